//! Triton: triton/compile.py compiles the kernels to cubins, of which each kernel's become one fat binary.

use crate::cuda::digits;
use serde_json::Value;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

const HOW: &str = "run tools/setup-triton.sh, set PEGAINFER_TRITON_PYTHON to a Python with Triton 3.6, or build without \
                   the feature `triton`";

/// Compiles the kernels; the text of their `TritonKernel`s.
pub fn build(nvcc: &Path, architectures: &[String], root: &Path, out: &Path) -> Result<String, String> {
    let (directory, out) = (root.join("triton"), out.join("triton"));
    println!("cargo:rerun-if-changed={}", directory.display());
    let python = python(root);
    let status = Command::new(&python)
        .arg(directory.join("compile.py"))
        .arg(&out)
        .args(architectures.iter().map(|sm| digits(sm)))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .status()
        .map_err(|e| format!("feature triton: {}: {e}; {HOW}", python.display()))?;
    if !status.success() {
        return Err(format!("feature triton: {} failed on triton/compile.py; {HOW}", python.display()));
    }
    let path = out.join("kernels.json");
    let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let mut images = String::new();
    for kernel in parse(&text)? {
        let image = out.join(format!("{}.fatbin", kernel.name));
        if !kernel.builds.is_empty() {
            link(nvcc, architectures, &kernel, &out, &image)?;
        }
        let _ = write!(images, "{}", declaration(&kernel, &image));
    }
    Ok(images)
}

/// The environment's, that of tools/setup-triton.sh, or the PATH's.
fn python(root: &Path) -> PathBuf {
    let pinned = root.join("../.triton/bin/python");
    if pinned.exists() {
        println!("cargo:rerun-if-changed={}", pinned.display());
    }
    match env::var_os("PEGAINFER_TRITON_PYTHON") {
        Some(python) if !python.is_empty() => python.into(),
        _ if pinned.is_file() => pinned,
        _ => "python3".into(),
    }
}

/// A kernel as kernels.json describes it.
#[derive(Debug, PartialEq)]
pub struct Kernel {
    pub name: String,
    pub builds: Vec<Build>,
    /// Rust expressions of the crate's `Parameter`, in the kernel's order.
    pub parameters: Vec<String>,
}

/// A kernel for one architecture.
#[derive(Debug, PartialEq)]
pub struct Build {
    pub sm: u64,
    pub cubin: String,
    pub entry: String,
    pub threads: u64,
    pub shared: u64,
}

/// The kernels of a kernels.json.
pub fn parse(text: &str) -> Result<Vec<Kernel>, String> {
    let wrong = |what: &str| format!("triton/kernels.json: {what}");
    let json: Value = serde_json::from_str(text).map_err(|e| wrong(&e.to_string()))?;
    let string = |v: &Value| v.as_str().map(str::to_owned).ok_or_else(|| wrong(&format!("expected a string, not {v}")));
    let number = |v: &Value| v.as_u64().ok_or_else(|| wrong(&format!("expected a number, not {v}")));
    let list = |v: &Value| v.as_array().cloned().ok_or_else(|| wrong(&format!("expected a list, not {v}")));
    let build = |v: &Value| -> Result<Build, String> {
        Ok(Build {
            sm: number(&v["sm"])?,
            cubin: string(&v["cubin"])?,
            entry: string(&v["entry"])?,
            threads: 32 * number(&v["warps"])?,
            shared: number(&v["shared"])?,
        })
    };
    let parameter = |v: &Value| -> Result<String, String> {
        let name = string(&v["name"])?;
        let kind = match string(&v["type"])?.as_str() {
            "pointer" => "Kind::Pointer".to_owned(),
            "i32" => "Kind::I32".to_owned(),
            "tile" => format!("Kind::Tile {{ rows: {}, columns: {} }}", number(&v["box"][0])?, number(&v["box"][1])?),
            other => return Err(wrong(&format!("unknown type {other}"))),
        };
        Ok(format!("Parameter {{ name: {name:?}, kind: {kind} }}"))
    };
    let kernel = |v: &Value| -> Result<Kernel, String> {
        Ok(Kernel {
            name: string(&v["name"])?,
            builds: list(&v["architectures"])?.iter().map(build).collect::<Result<_, _>>()?,
            parameters: list(&v["parameters"])?.iter().map(parameter).collect::<Result<_, _>>()?,
        })
    };
    list(&json)?.iter().map(kernel).collect()
}

/// Puts the cubins of a kernel into one fat binary.
fn link(nvcc: &Path, architectures: &[String], kernel: &Kernel, out: &Path, image: &Path) -> Result<(), String> {
    let fatbinary = nvcc.with_file_name("fatbinary");
    let part = |build: &Build| {
        let sm = architectures.iter().find(|sm| digits(sm) == build.sm.to_string());
        let sm = sm.cloned().unwrap_or_else(|| build.sm.to_string());
        format!("--image3=kind=elf,sm={sm},file={}", out.join(&build.cubin).display())
    };
    let status = Command::new(&fatbinary)
        .args(["--64", "--compress-all"])
        .arg(format!("--create={}", image.display()))
        .args(kernel.builds.iter().map(part))
        .status()
        .map_err(|e| format!("{}: {e}", fatbinary.display()))?;
    status.success().then_some(()).ok_or_else(|| format!("{} failed on {}", fatbinary.display(), kernel.name))
}

/// The `TritonKernel` of a kernel, whose image is empty where it was compiled for none of the GPUs.
fn declaration(kernel: &Kernel, image: &Path) -> String {
    let Kernel { name, builds, parameters } = kernel;
    let bytes = match builds.is_empty() {
        true => "&[]".to_owned(),
        false => format!("&Aligned(*include_bytes!({image:?})).0"),
    };
    let build = |b: &Build| {
        format!("Build {{ sm: {}, entry: {:?}, threads: {}, shared: {} }}", b.sm, b.entry, b.threads, b.shared)
    };
    format!(
        "/// The Triton kernel `{name}`.\n\
         pub static TRITON_{}: TritonKernel = TritonKernel {{\n    \
             image: Image {{ name: \"triton {name}\", bytes: {bytes} }},\n    \
             builds: &[{}],\n    parameters: &[{}],\n}};\n",
        name.to_uppercase(),
        builds.iter().map(build).collect::<Vec<_>>().join(", "),
        parameters.join(", "),
    )
}
