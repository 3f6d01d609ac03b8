//! Models in several GGUF files: `NAME-00001-of-00003.gguf` and so on. The first one has the metadata.

use super::metadata::Metadata;
use crate::error::FilesError;
use std::path::{Path, PathBuf};

/// Maximum number of shards.
const MAX_SHARDS: usize = 4096;
/// Beginnings of the names of files next to a model that are none: the image encoder, the layer that drafts, and the
/// statistics of quantisation.
const OTHER_FILES: [&str; 3] = ["mmproj", "mtp-", "imatrix"];

/// The parts of the name of a shard: `NAME`, number from 1, count.
fn parse(file: &str) -> Option<(&str, usize, usize)> {
    let stem = file.strip_suffix(".gguf")?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (name, number) = rest.rsplit_once('-')?;
    let parse = |digits: &str| {
        let valid = digits.len() == 5 && digits.bytes().all(|byte| byte.is_ascii_digit());
        valid.then(|| digits.parse::<usize>().ok()).flatten()
    };
    let (number, count) = (parse(number)?, parse(count)?);
    ((1..=count).contains(&number) && count <= MAX_SHARDS).then_some((name, number, count))
}

/// Names of all shards of the model with the file `file`, in order; `file` alone if its name is not that of a shard.
pub fn shard_names(file: &str) -> Vec<String> {
    match parse(file) {
        Some((name, _, count)) => (1..=count).map(|i| format!("{name}-{i:05}-of-{count:05}.gguf")).collect(),
        None => vec![file.to_owned()],
    }
}

/// Name of the model with the file `file`: without the extension, and without the numbers of a shard.
pub fn model_name(file: &str) -> &str {
    parse(file).map_or_else(|| file.strip_suffix(".gguf").unwrap_or(file), |(name, ..)| name)
}

/// True if the name is that of a model's weights or of their first shard, rather than of a file next to them.
pub fn is_model(file: &str) -> bool {
    let name = file.to_ascii_lowercase();
    let other = OTHER_FILES.iter().any(|other| name.starts_with(other)) || name.contains("imatrix");
    name.ends_with(".gguf") && !other && parse(file).is_none_or(|(_, number, _)| number == 1)
}

/// Paths of all shards of the model with the file `path`.
pub(super) fn paths(path: &Path) -> Vec<PathBuf> {
    match path.file_name().and_then(|name| name.to_str()) {
        Some(name) => shard_names(name).into_iter().map(|name| path.with_file_name(name)).collect(),
        None => vec![path.to_owned()],
    }
}

/// Checks that a file is shard `number` (from 0) of `count`, as its name says.
pub(super) fn check(path: &Path, metadata: &Metadata, (number, count): (usize, usize)) -> Result<(), FilesError> {
    let field = |key: &str, default: usize| {
        let value = metadata.unsigned(key).map_err(|message| FilesError::damaged(path, message))?;
        Ok(value.unwrap_or(default as u64))
    };
    let (stated, of) = (field("split.no", number)?, field("split.count", count)?);
    // Some writers set 0 for a model in one file.
    if stated == number as u64 && of.max(1) == count as u64 {
        return Ok(());
    }
    let message = match count {
        1 => format!(
            "it is shard {} of {of}, and its name must end in -{:05}-of-{of:05}.gguf",
            stated.saturating_add(1),
            stated.saturating_add(1)
        ),
        _ => format!("its metadata says shard {} of {of}, and its name another one", stated.saturating_add(1)),
    };
    Err(FilesError::unsupported(path, message))
}

/// Checks the number of tensors of all shards against the first shard's metadata.
pub(super) fn check_count(path: &Path, metadata: &Metadata, tensors: usize) -> Result<(), FilesError> {
    let stated = metadata.unsigned("split.tensors.count").map_err(|message| FilesError::damaged(path, message))?;
    match stated {
        Some(stated) if stated != tensors as u64 => {
            Err(FilesError::damaged(path, format!("its shards have {tensors} tensors, and its metadata says {stated}")))
        }
        _ => Ok(()),
    }
}
