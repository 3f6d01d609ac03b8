//! Headers of safetensors files: names, dtypes and shapes, without the weights.

use pegainfer_core::weights::is_file_name;
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// The format's own limit.
const MAX_HEADER: u64 = 100_000_000;

/// Why a header cannot be read.
#[derive(Debug, Error)]
pub enum HeaderError {
    /// A file is missing or unreadable.
    #[error("cannot read {}: {error}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Error of the system.
        error: std::io::Error,
    },
    /// The header is damaged.
    #[error("{file} is damaged or truncated ({message}); download it again")]
    Damaged {
        /// The file.
        file: String,
        /// Description of the error.
        message: String,
    },
}

/// One tensor in a header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// Dtype as named in the file.
    pub dtype: String,
    /// Stored shape.
    pub shape: Vec<usize>,
    /// Size in bytes, from its offsets.
    pub bytes: u64,
}

/// One file's header.
pub(super) struct Header {
    pub tensors: BTreeMap<String, Stored>,
    /// Length that the file must have.
    pub bytes_announced: u64,
    /// Length that it has.
    pub bytes_present: u64,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct Info {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

/// The weight files of a directory: those of the index, or `model.safetensors`; none if neither exists.
pub(super) fn files(dir: &Path) -> Result<Vec<PathBuf>, HeaderError> {
    let (index, single) = (dir.join("model.safetensors.index.json"), dir.join("model.safetensors"));
    if !index.is_file() {
        return Ok(Some(single).into_iter().filter(|path| path.is_file()).collect());
    }
    let text = std::fs::read_to_string(&index).map_err(|error| HeaderError::Io { path: index.clone(), error })?;
    let parsed: Index =
        serde_json::from_str(&text).map_err(|e| damaged(&index.display().to_string(), e.to_string()))?;
    let names: BTreeSet<String> = parsed.weight_map.into_values().collect();
    if let Some(name) = names.iter().find(|name| !is_file_name(name)) {
        let message = format!("it names {name:?}, which is not a file of the checkpoint's directory");
        return Err(damaged(&index.display().to_string(), message));
    }
    Ok(names.into_iter().map(|name| dir.join(name)).collect())
}

/// Reads only the header of a file.
pub(super) fn read(path: &Path) -> Result<Header, HeaderError> {
    let io = |error| HeaderError::Io { path: path.to_owned(), error };
    let mut file = File::open(path).map_err(io)?;
    let bytes_present = file.metadata().map_err(io)?.len();
    let name = path.display().to_string();
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(|e| damaged(&name, e.to_string()))?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER || length + 8 > bytes_present {
        return Err(damaged(&name, format!("its header is said to have {length} bytes")));
    }
    let mut text = String::new();
    file.take(length).read_to_string(&mut text).map_err(|e| damaged(&name, e.to_string()))?;
    let (tensors, end) = parse(&name, &text)?;
    Ok(Header { tensors, bytes_announced: 8 + length + end, bytes_present })
}

/// The tensors of a header's JSON; `file` names it in errors.
pub fn parse_header(file: &str, text: &str) -> Result<BTreeMap<String, Stored>, HeaderError> {
    parse(file, text).map(|(tensors, _)| tensors)
}

/// The tensors, and the end of the last one.
fn parse(file: &str, text: &str) -> Result<(BTreeMap<String, Stored>, u64), HeaderError> {
    let entries: BTreeMap<String, Value> = serde_json::from_str(text).map_err(|e| damaged(file, e.to_string()))?;
    let (mut tensors, mut last) = (BTreeMap::new(), 0);
    for (name, entry) in entries.into_iter().filter(|(name, _)| name != "__metadata__") {
        let info = Info::deserialize(entry).map_err(|e| damaged(file, format!("{name}: {e}")))?;
        let (first, end) = info.data_offsets;
        let bytes = end.checked_sub(first).ok_or_else(|| damaged(file, format!("{name} ends before it begins")))?;
        last = last.max(end);
        tensors.insert(name, Stored { dtype: info.dtype, shape: info.shape, bytes });
    }
    Ok((tensors, last))
}

fn damaged(file: &str, message: String) -> HeaderError {
    HeaderError::Damaged { file: file.to_owned(), message }
}
