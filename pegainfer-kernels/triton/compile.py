#!/usr/bin/env python3
"""Compiles the Triton kernels of this directory for some GPUs, without a GPU and without torch.

    python3 compile.py OUT ARCHITECTURE...      # architectures as 90 for compute capability 9.0

Writes OUT/NAME.sm_90.cubin for every kernel and architecture that the kernel lists, and OUT/kernels.json:

    [{"name", "architectures": [{"sm": 90, "cubin", "entry", "warps", "shared"}], "parameters": [{"name", "type", ...}]}]

"shared": bytes of dynamic shared memory. "type": "pointer", "i32", or "tile" with "rows", "columns" and "box", the rows and
columns of the TMA box that the descriptor must have. A tile takes five of the compiled kernel's parameters: the
descriptor, its shape (two i32) and its strides (two i64). Two pointers to scratch memory, which is never wanted here,
follow all of them.
"""
import importlib
import json
import os
import pathlib
import re
import sys

VERSION = "3.6."
HERE = pathlib.Path(__file__).parent


def modules():
    sys.path.insert(0, str(HERE))
    for path in sorted(HERE.glob("*.py")):
        if path.name not in ("aot.py", "compile.py"):
            yield importlib.import_module(path.stem)


def compile_kernel(kernel, sm):
    """The compiled kernel of one architecture."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.function.arg_names
    constants = {(names.index(name),): value for name, value in kernel.constants.items()}
    types = {name: "constexpr" if name in kernel.constants else str(kernel.signature[name]) for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, type in enumerate(types.values()) if type.startswith("*")}
    source = ASTSource(fn=kernel.function, signature=types, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=kernel.options)


def parameters(kernel, metadata):
    """The run-time parameters, with the boxes of tiles."""
    tiles, out = iter(metadata.tensordesc_meta or []), []
    for name, type in kernel.signature.items():
        if type == "i32":
            out.append({"name": name, "type": "i32"})
        elif isinstance(type, str):
            out.append({"name": name, "type": "pointer"})
        else:
            box = next(tiles)["block_size"]
            out.append({"name": name, "type": "tile", "rows": type.rows, "columns": type.columns, "box": list(box)})
    return out


def check(kernel, compiled, listed):
    """The launcher builds its arguments from `listed`: it must be what the compiled kernel takes."""
    metadata, name = compiled.metadata, compiled.metadata.name
    if metadata.global_scratch_size or metadata.profile_scratch_size or metadata.num_ctas != 1:
        raise SystemExit(f"{name} wants scratch memory or clusters, which the launcher does not give")
    sizes = {"pointer": ["u64"], "i32": ["u32"], "tile": ["b8", "u32", "u32", "u64", "u64"]}
    expected = [size for p in listed for size in sizes[p["type"]]] + ["u64", "u64"]
    head = compiled.asm["ptx"].split(".entry", 1)[1].split(")", 1)[0]
    found = re.findall(r"\.param \.(?:align \d+ )?\.?([a-z]\d+)", head)
    if found != expected:
        raise SystemExit(f"{name} takes {found}, expected {expected}")
    if list(kernel.signature) + list(kernel.constants) != kernel.function.arg_names:
        raise SystemExit(f"{name}: signature and constants must follow the function's parameters")


def build(kernel, out, architectures):
    """Compiles one kernel; its entry in kernels.json."""
    name, listed, built = kernel.function.__name__, None, []
    for sm in sorted(set(architectures) & set(kernel.architectures)):
        compiled = compile_kernel(kernel, sm)
        listed = parameters(kernel, compiled.metadata)
        check(kernel, compiled, listed)
        cubin = f"{name}.sm_{sm}.cubin"
        (out / cubin).write_bytes(compiled.asm["cubin"])
        metadata = compiled.metadata
        built.append({"sm": sm, "cubin": cubin, "entry": metadata.name, "warps": metadata.num_warps,
                      "shared": metadata.shared})
    return {"name": name, "architectures": built, "parameters": listed or []}


def main():
    out, architectures = pathlib.Path(sys.argv[1]), [int(sm) for sm in sys.argv[2:]]
    out.mkdir(parents=True, exist_ok=True)
    os.environ["TRITON_CACHE_DIR"] = str(out / "cache")
    try:
        import triton
    except ImportError as error:
        raise SystemExit(f"{sys.executable} has no Triton: {error}")
    if not triton.__version__.startswith(VERSION):
        raise SystemExit(f"{sys.executable} has Triton {triton.__version__}; the launcher is for {VERSION}x")
    kernels = [build(kernel, out, architectures) for module in modules() for kernel in module.KERNELS]
    (out / "kernels.json").write_text(json.dumps(kernels, indent=1) + "\n")


if __name__ == "__main__":
    main()
