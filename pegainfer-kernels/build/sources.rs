//! Hashes of the sources that decide how long a step takes, by which a ledger knows that its times are stale.

use std::fs;
use std::path::{Path, PathBuf};

/// A hash: the name of its variable, its folders, and whether the sources that only DeepSeek-V4 uses are among them.
type Hash = (&'static str, &'static [&'static str], bool);

const CPU: &[&str] = &["src/cpu"];
const CUDA: &[&str] = &["csrc", "triton", "tilelang", "src/cuda", "src/choice"];
/// Parts of names of the sources that only DeepSeek-V4 uses.
const ONLY_DEEPSEEK_V4: [&str; 3] = ["deepseek_v4", "hyper_mix", "collectives"];
/// Hashes by device and models.
const HASHES: [Hash; 4] = [
    ("KERNELS_CPU_QWEN", CPU, false),
    ("KERNELS_CPU_DEEPSEEK_V4", CPU, true),
    ("KERNELS_CUDA_QWEN", CUDA, false),
    ("KERNELS_CUDA_DEEPSEEK_V4", CUDA, true),
];

/// Gives the crate the hashes (FNV-1a, 16 hexadecimal digits) of kernels, their launchers and their choice, as variables of the
/// environment. Comments, empty lines, unit tests and the signatures that `src/cuda/abi` lists do not count.
pub fn emit_hashes(root: &Path) -> Result<(), String> {
    for folder in CPU.iter().chain(CUDA) {
        println!("cargo:rerun-if-changed={}", root.join(folder).display());
    }
    for (variable, folders, deepseek_v4) in HASHES {
        let mut files = Vec::new();
        for folder in folders {
            files_below(&root.join(folder), &mut files)?;
        }
        files.sort();
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        for file in files {
            let name = file.strip_prefix(root).unwrap_or(&file).to_string_lossy().into_owned();
            let only_deepseek_v4 = ONLY_DEEPSEEK_V4.iter().any(|part| name.contains(part));
            let is_test = name.ends_with("/tests.rs") || name.contains("/tests/");
            if is_test || name.starts_with("src/cuda/abi/") || (only_deepseek_v4 && !deepseek_v4) {
                continue;
            }
            let text = fs::read_to_string(&file).map_err(|e| format!("{}: {e}", file.display()))?;
            for byte in name.bytes().chain(code(&text).flat_map(str::bytes)) {
                hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
            }
        }
        println!("cargo:rustc-env={variable}={hash:016x}");
    }
    Ok(())
}

/// The lines of a source that a compiler sees, without their indentation, up to the unit tests of a Rust file.
fn code(text: &str) -> impl Iterator<Item = &str> {
    let tests = text.find("\n#[cfg(test)]\nmod tests {").unwrap_or(text.len());
    let lines = text[..tests].lines().map(str::trim);
    lines.filter(|line| !line.is_empty() && !line.starts_with("//") && !line.starts_with("# "))
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
