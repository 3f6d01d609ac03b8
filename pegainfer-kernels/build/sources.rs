//! Hashes of the sources that decide how long a step takes, by which a ledger knows that its times are stale.

use std::fs;
use std::path::{Path, PathBuf};

/// A hash: the name of its variable, its folders, and whether the sources that only DeepSeek-V4 uses are among them.
type Hash = (&'static str, &'static [&'static str], bool);

const CPU: &[&str] = &["src/cpu"];
const CUDA: &[&str] = &["csrc", "triton", "tilelang", "src/cuda", "src/choice"];
/// Parts of names of the sources that only DeepSeek-V4 uses.
const ONLY_DEEPSEEK_V4: [&str; 3] = ["deepseek_v4", "csrc/experts/", "hyper_mix"];
/// Hashes by device and models.
const HASHES: [Hash; 4] = [
    ("KERNELS_CPU_QWEN", CPU, false),
    ("KERNELS_CPU_DEEPSEEK_V4", CPU, true),
    ("KERNELS_CUDA_QWEN", CUDA, false),
    ("KERNELS_CUDA_DEEPSEEK_V4", CUDA, true),
];

/// Gives the crate the hashes (FNV-1a, 16 hexadecimal digits) of kernels, their launchers and their choice, as variables of the
/// environment. Comments, white space, unit tests and the signatures that `src/cuda/abi` lists do not count.
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
            for byte in name.bytes().chain(code(&text, name.ends_with(".py")).bytes()) {
                hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
            }
        }
        println!("cargo:rustc-env={variable}={hash:016x}");
    }
    Ok(())
}

/// What a compiler sees of a source: without comments and, outside strings, white space, up to the unit tests of a Rust file.
/// Of Python, lines without their indentation.
fn code(text: &str, is_python: bool) -> String {
    if is_python {
        return text.lines().map(str::trim).filter(|line| !line.starts_with("# ")).collect();
    }
    let mut rest = &text[..text.find("\n#[cfg(test)]\nmod tests {").unwrap_or(text.len())];
    let mut code = String::new();
    while let Some(first) = rest.chars().next() {
        let comment_end = match rest {
            _ if rest.starts_with("//") => rest.find('\n'),
            _ if rest.starts_with("/*") => rest.find("*/").map(|at| at + 2),
            _ => Some(0),
        };
        let (skipped, kept) = match (comment_end, first) {
            (None, _) => (rest.len(), 0),
            (Some(end @ 1..), _) => (end, 0),
            (_, '"') => (0, string_length(rest)),
            (_, '\'') if rest.starts_with("'\"'") => (0, 3),
            // A backslash ends the lines of a macro.
            (_, c) if c.is_whitespace() || rest.starts_with("\\\n") => (c.len_utf8(), 0),
            (_, c) => (0, c.len_utf8()),
        };
        code += &rest[skipped..skipped + kept];
        rest = &rest[skipped + kept..];
    }
    code
}

/// Bytes of the string that `text` begins with, with its quotes.
fn string_length(text: &str) -> usize {
    let mut is_escaped = false;
    let end = text.char_indices().skip(1).find(|(_, c)| {
        let ends = *c == '"' && !is_escaped;
        is_escaped = *c == '\\' && !is_escaped;
        ends
    });
    end.map_or(text.len(), |(at, _)| at + 1)
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
