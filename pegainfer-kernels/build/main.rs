//! Compiles the GPU kernels to fat binaries that the crate embeds, and writes `images.rs`, which names them: the .cu files of
//! csrc/ and tilelang/ by nvcc, and under the feature `triton` the kernels of triton/*.py.
//!
//! `PEGAINFER_CUDA=auto|required|off`: whether to; `PEGAINFER_CUDA_SM=90a,120`: for which GPUs, by default the ones of
//! this machine, or [`cuda::DEFAULT_SM`]; `PEGAINFER_TRITON_PYTHON`: a Python that has Triton. Without CUDA the images are
//! empty and the build is CPU-only.

mod abi;
mod cuda;
mod sources;
#[cfg(feature = "triton")]
mod triton;

use std::path::PathBuf;
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
    let built = match (&nvcc, &architectures) {
        (Some(nvcc), Some(architectures)) => Some(cuda::compile(nvcc, architectures, &sources, &out)?),
        _ => None,
    };
    #[allow(unused_mut, reason = "the feature adds to it")]
    let mut images = cuda::images(&sources, built.as_deref());
    #[cfg(feature = "triton")]
    if let (Some(nvcc), Some(architectures)) = (&nvcc, &architectures) {
        images += &triton::build(nvcc, architectures, &root, &out)?;
        println!("cargo:rustc-cfg=triton_kernels");
    }
    fs::write(out.join("images.rs"), images).map_err(|e| format!("images.rs: {e}"))?;
    sources::emit_hashes(&root)
}

fn variable(name: &str) -> Result<String, String> {
    env::var(name).map_err(|e| format!("{name}: {e}"))
}
