//! The fastest candidate of each GEMM, remembered from earlier runs in a small text file.
//!
//! A line is `CANDIDATE M N K DTYPE GPU AND LIBRARY`. The candidate is its index in the heuristic's list, which depends
//! only on the GEMM, the GPU and the library, so a wrong file can cost only speed. Lines are only appended, each in one
//! write, so that processes can share the file; the last line of a GEMM counts.

use super::gemm_size::{GemmSize, Multiplied};
use pegainfer_core::tensor::DType;
use std::collections::HashMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::{env, fs};

/// Changes when the list that the heuristic is asked for does.
const FILE: &str = "pegainfer/blaslt-1.txt";

/// Autotuned made on one GPU with one library.
pub(super) struct Autotuned {
    /// Path of the file, if any.
    path: Option<PathBuf>,
    /// GPU, driver and library.
    place: String,
    known: HashMap<GemmSize, usize>,
}

impl Autotuned {
    /// Reads the lines of `place` in `path`.
    pub fn load(path: Option<PathBuf>, place: String) -> Self {
        let text = path.as_deref().map_or(Ok(String::new()), read).unwrap_or_else(|error| {
            log::warn!("the timings of cuBLASLt cannot be read and will be measured again: {error}");
            String::new()
        });
        let lines: Vec<_> = text.lines().filter(|line| !line.is_empty()).map(parse).collect();
        let broken = lines.iter().filter(|line| line.is_none()).count();
        if let (1.., Some(path)) = (broken, &path) {
            log::warn!("{}: {broken} invalid lines are ignored", path.display());
        }
        let here = lines.into_iter().flatten().filter(|(_, _, at)| *at == place);
        let known = here.map(|(gemm, candidate, _)| (gemm, candidate)).collect();
        Self { path, place, known }
    }

    /// The candidate to take.
    pub fn get(&self, gemm: GemmSize) -> Option<usize> {
        self.known.get(&gemm).copied()
    }

    /// Remembers a choice here and, if that is possible, for later runs.
    pub fn add(&mut self, gemm: GemmSize, candidate: usize) {
        self.known.insert(gemm, candidate);
        let GemmSize { m, n, k, out, .. } = gemm;
        let line = format!("{candidate} {m} {n} {k} {out} {}\n", self.place);
        if let Some(path) = &self.path
            && let Err(error) = append(path, &line)
        {
            log::warn!("{}: cannot be written, so cuBLASLt is measured at each start: {error}", path.display());
            self.path = None;
        }
    }
}

/// `$XDG_CACHE_HOME` or `~/.cache`, then the file.
pub(super) fn file() -> Option<PathBuf> {
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
    cache.map(|dir| dir.join(FILE))
}

fn read(path: &Path) -> io::Result<String> {
    match fs::read(path) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(error),
    }
}

fn append(path: &Path, line: &str) -> io::Result<()> {
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir)?;
    }
    fs::OpenOptions::new().create(true).append(true).open(path)?.write_all(line.as_bytes())
}

/// GemmSize, candidate, place.
fn parse(line: &str) -> Option<(GemmSize, usize, &str)> {
    let mut fields = line.splitn(6, ' ');
    let mut number = || fields.next()?.parse::<usize>().ok();
    let (candidate, m, n, k) = (number()?, number()?, number()?, number()?);
    let out = match fields.next()? {
        "bf16" => DType::Bf16,
        "f32" => DType::F32,
        _ => return None,
    };
    let gemm = GemmSize::whole((m, n, k), out, Multiplied::Bf16);
    Some((gemm, candidate, fields.next()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn algorithms_are_found_again_and_a_broken_file_is_not_fatal() {
        let dir = env::temp_dir().join(format!("pegainfer-autotuned-{}", std::process::id()));
        let path = dir.join(FILE);
        let gemm = GemmSize::whole((64, 2560, 4096), DType::Bf16, Multiplied::Bf16);
        let load = |place: &str| Autotuned::load(Some(path.clone()), place.to_owned());
        load("GPU A, lib 1").add(gemm, 3);
        load("GPU B, lib 1").add(gemm, 5);
        append(&path, "64 bits of noise\n\u{0}\n3 1 2\n").unwrap();
        assert_eq!(load("GPU A, lib 1").get(gemm), Some(3));
        assert_eq!(load("GPU A, lib 2").get(gemm), None);
        assert_eq!(load("GPU A, lib 1").get(GemmSize { out: DType::F32, ..gemm }), None);
        load("GPU A, lib 1").add(gemm, 0);
        assert_eq!(load("GPU A, lib 1").get(gemm), Some(0));
        assert_eq!(load("GPU B, lib 1").get(gemm), Some(5));
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_place_that_cannot_be_written_is_left_alone() {
        let mut autotuned = Autotuned::load(Some(PathBuf::from("/dev/null/pegainfer")), "here".to_owned());
        let gemm = GemmSize::whole((64, 8, 8), DType::F32, Multiplied::Bf16);
        autotuned.add(gemm, 2);
        assert_eq!((autotuned.get(gemm), autotuned.path), (Some(2), None));
    }
}
