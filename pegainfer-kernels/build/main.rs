//! Compiles the GPU kernels to fat binaries that the crate embeds, and writes `images.rs`, which names them: csrc/*.cu and
//! tilelang/*.cu by nvcc, and under the feature `triton` the kernels of triton/*.py.
//!
//! `PEGAINFER_CUDA=auto|required|off`: whether to; `PEGAINFER_CUDA_SM=90a,120a`: for which GPUs, by default the ones of
//! this machine, or [`cuda::DEFAULT_SM`]; `PEGAINFER_TRITON_PYTHON`: a Python that has Triton. Without CUDA the images are
//! empty and the build is CPU-only.

mod abi;
mod cuda;
#[cfg(feature = "triton")]
mod triton;

use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() {
    if let Err(message) = build() {
        eprintln!("error: {message}");
        std::process::exit(1);
    }
}

fn build() -> Result<(), String> {
    for name in ["PEGAINFER_CUDA", "PEGAINFER_CUDA_SM", "PEGAINFER_TRITON_PYTHON", "CUDA_HOME", "PATH"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    // Set where the images have the Triton kernels.
    println!("cargo:rustc-check-cfg=cfg(triton_kernels)");
    let (root, out) = (PathBuf::from(variable("CARGO_MANIFEST_DIR")?), PathBuf::from(variable("OUT_DIR")?));
    let nvcc = cuda::nvcc(&root)?;
    let sources = cuda::sources(&root)?;
    let architectures = nvcc.as_deref().map(cuda::architectures).transpose()?;
    if let (Some(nvcc), Some(architectures)) = (&nvcc, &architectures) {
        cuda::compile(nvcc, architectures, &sources, &out)?;
    }
    #[allow(unused_mut, reason = "the feature adds to it")]
    let mut images = cuda::images(&sources, &out, nvcc.is_some());
    #[cfg(feature = "triton")]
    if let (Some(nvcc), Some(architectures)) = (&nvcc, &architectures) {
        images += &triton::build(nvcc, architectures, &root, &out)?;
        println!("cargo:rustc-cfg=triton_kernels");
    }
    fs::write(out.join("images.rs"), images).map_err(|e| format!("images.rs: {e}"))?;
    println!("cargo:rustc-env=KERNEL_SOURCES={:016x}", hash_of_sources(&root)?);
    Ok(())
}

/// Hash (FNV-1a) of the sources that decide how long a step takes: kernels of all devices, their launchers and their choice.
fn hash_of_sources(root: &Path) -> Result<u64, String> {
    let mut files = Vec::new();
    for folder in ["csrc", "triton", "tilelang", "src/cpu", "src/cuda", "src/choice"] {
        println!("cargo:rerun-if-changed={}", root.join(folder).display());
        files_below(&root.join(folder), &mut files)?;
    }
    files.sort();
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for file in files {
        let bytes = fs::read(&file).map_err(|e| format!("{}: {e}", file.display()))?;
        let name = file.strip_prefix(root).unwrap_or(&file).to_string_lossy().into_owned();
        for byte in name.bytes().chain(bytes) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    Ok(hash)
}

/// Source files of a folder and of those in it.
fn files_below(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), String> {
    for entry in fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))? {
        let path = entry.map_err(|e| e.to_string())?.path();
        if path.is_dir() && path.file_name() != Some("__pycache__".as_ref()) {
            files_below(&path, files)?;
        } else if path.extension().is_some_and(|kind| ["cu", "cuh", "py", "rs"].iter().any(|source| kind == *source)) {
            files.push(path);
        }
    }
    Ok(())
}

fn variable(name: &str) -> Result<String, String> {
    env::var(name).map_err(|e| format!("{name}: {e}"))
}
