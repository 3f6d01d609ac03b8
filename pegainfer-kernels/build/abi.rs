//! The header of each .cu file of csrc/ that declares its kernels' parameters, the check of its entry points, and `limits.h`.

#[macro_use]
#[path = "../src/cuda/abi/header.rs"]
mod header;

macro_rules! kernels {
    ($($table:tt)*) => {
        use super::header::{Parameter, Signature};
        signatures!(KERNELS; $($table)*);
    };
}

macro_rules! pointers {
    ($($image:ident: $name:ident $members:tt)*) => {
        signatures!(STRUCTS; $($image: $name as $name [] $members)*);
    };
}

#[rustfmt::skip]
#[path = "../src/cuda/abi/kernels.rs"]
mod kernels;

#[path = "../src/limits.rs"]
mod limits;

use kernels::{KERNELS, STRUCTS};
use std::fs;
use std::path::Path;

/// Writes `limits.h` into `out`.
pub fn write_limits(out: &Path) -> Result<(), String> {
    fs::write(out.join("limits.h"), limits::header()).map_err(|e| format!("limits.h: {e}"))
}

/// Writes `abi/IMAGE.h` into `out`; `image`: its name.
pub fn write_header(image: &str, out: &Path) -> Result<(), String> {
    let path = out.join("abi").join(format!("{image}.h"));
    let written = fs::create_dir_all(out.join("abi"));
    written
        .and_then(|()| fs::write(&path, header::header(image, &[STRUCTS, KERNELS])))
        .map_err(|e| format!("{}: {e}", path.display()))
}

/// An error unless the entry points that ptxas names in `log` are those listed for `image`.
pub fn check_entries(image: &str, log: &str) -> Result<(), String> {
    let mut built: Vec<&str> = log.lines().filter_map(entry).collect();
    built.sort_unstable();
    built.dedup();
    let listed = header::entries(image, KERNELS);
    if built == listed {
        return Ok(());
    }
    Err(format!("the image {image} has the kernels {built:?}, src/cuda/abi/kernels.rs lists {listed:?}"))
}

/// The entry point that a line of ptxas names.
fn entry(line: &str) -> Option<&str> {
    line.split_once("Compiling entry function '")?.1.split('\'').next()
}

/// Whether a line of nvcc is ptxas's report on a kernel. Its advice has a code in brackets.
pub fn is_report(line: &str) -> bool {
    (line.starts_with("ptxas info") && !line.contains(": (")) || line.trim_start().ends_with("bytes spill loads")
}
