//! What build/triton.rs reads of triton/compile.py, and what a build with the feature `triton` has. Needs no GPU.

#[path = "../build/abi.rs"]
#[allow(dead_code, reason = "part of the build script")]
mod abi;
#[path = "../build/cuda.rs"]
#[allow(dead_code, reason = "part of the build script")]
mod cuda;
#[path = "../build/triton.rs"]
#[allow(dead_code, reason = "part of the build script")]
mod triton;

use triton::{Build, parse};

const KERNELS: &str = r#"[{
    "name": "add",
    "architectures": [{"sm": 90, "cubin": "add.sm_90.cubin", "entry": "add", "warps": 4, "shared": 512}],
    "parameters": [{"name": "x", "type": "tile", "rows": 64, "columns": 128, "box": [64, 64]},
        {"name": "y", "type": "pointer"}, {"name": "n", "type": "i32"}]
}]"#;

#[test]
fn metadata_is_read() {
    let kernels = parse(KERNELS).unwrap();
    let [kernel] = &kernels[..] else { panic!("{kernels:?}") };
    assert_eq!(kernel.name, "add");
    let (cubin, entry) = ("add.sm_90.cubin".to_owned(), "add".to_owned());
    assert_eq!(kernel.builds, [Build { sm: 90, cubin, entry, threads: 128, shared: 512 }]);
    assert_eq!(
        kernel.parameters,
        [
            r#"Parameter { name: "x", kind: Kind::Tile { rows: 64, columns: 64 } }"#,
            r#"Parameter { name: "y", kind: Kind::Pointer }"#,
            r#"Parameter { name: "n", kind: Kind::I32 }"#,
        ]
    );
}

#[test]
fn wrong_metadata_is_refused_by_name() {
    for (from, to, expected) in [
        ("i32", "f64", "unknown type f64"),
        ("\"warps\": 4", "\"warps\": -4", "expected a number, not -4"),
        ("\"name\": \"y\"", "\"name\": 7", "expected a string, not 7"),
        ("\"architectures\"", "\"builds\"", "expected a list, not null"),
    ] {
        let error = parse(&KERNELS.replace(from, to)).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}

/// Applies to a build for GPUs of compute capability 9.0.
#[cfg(triton_kernels)]
#[test]
fn images_have_their_entries() {
    let out = std::path::Path::new(env!("OUT_DIR")).join("triton");
    let kernels = parse(&std::fs::read_to_string(out.join("kernels.json")).unwrap()).unwrap();
    let names: Vec<_> = kernels.iter().map(|kernel| kernel.name.as_str()).collect();
    assert_eq!(names, ["gated_delta_intra", "gated_delta_scan"]);
    for kernel in &kernels {
        for build in kernel.builds.iter().filter(|build| build.sm == 90) {
            let cubin = std::fs::read(out.join(&build.cubin)).unwrap();
            let has = |name: &str| cubin.windows(name.len()).any(|part| part == name.as_bytes());
            assert!(cubin.starts_with(b"\x7fELF") && has(&format!(".text.{}", build.entry)), "{kernel:?}");
            assert!(build.threads == 128 && build.shared <= 227 << 10, "{build:?}");
            assert!(out.join(format!("{}.fatbin", kernel.name)).metadata().unwrap().len() > 1000);
        }
    }
}
