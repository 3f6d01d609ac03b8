//! Resolves `--model-path` to a directory.

use crate::models::args::{EngineArgs, LoadFormat};
use crate::models::hub::Hub;
use anyhow::{Result, bail};
use std::path::{Path, PathBuf};

/// The checkpoint that ships with the repository.
const BUNDLED: &str = "models/qwen3-tiny";

/// Directory of a checkpoint, and its Hugging Face id if it was downloaded.
pub struct ModelDir {
    /// Path of the directory.
    pub dir: PathBuf,
    /// Hugging Face id under which it was downloaded.
    pub hub_id: Option<String>,
}

/// Finds the checkpoint, downloading it if `--model-path` is a Hugging Face id.
pub fn resolve(args: &EngineArgs) -> Result<ModelDir> {
    find(args.model_path.as_deref(), args.load_format == LoadFormat::Auto)
}

/// Like [`resolve`], for commands that need no weights: they are not downloaded.
pub fn resolve_config(model_path: Option<&str>) -> Result<PathBuf> {
    Ok(find(model_path, false)?.dir)
}

fn find(model_path: Option<&str>, weights: bool) -> Result<ModelDir> {
    let Some(given) = model_path else {
        return Ok(ModelDir { dir: bundled()?, hub_id: None });
    };
    let dir = PathBuf::from(given);
    if dir.is_dir() {
        return Ok(ModelDir { dir, hub_id: None });
    }
    if dir.exists() {
        bail!("--model-path {given} is a file: give the directory that holds config.json");
    }
    if !is_hub_id(given) {
        bail!("--model-path {given} is neither a directory nor a Hugging Face id such as Qwen/Qwen3-0.6B");
    }
    let dir = Hub::from_env().fetch(given, weights)?;
    Ok(ModelDir { dir, hub_id: Some(given.to_owned()) })
}

/// Whether the text is `organisation/name`, in the characters that the hub allows.
fn is_hub_id(text: &str) -> bool {
    let valid = |part: &str| {
        !part.is_empty()
            && !part.starts_with(['.', '-', '~'])
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
    };
    text.split_once('/').is_some_and(|(organisation, name)| valid(organisation) && valid(name))
}

/// Finds the bundled checkpoint: in the current directory, next to the executable or in one of the directories above it, or
/// in the source tree.
fn bundled() -> Result<PathBuf> {
    let executable = std::env::current_exe().ok();
    let above = executable.iter().flat_map(|path| path.ancestors().skip(1)).map(Path::to_path_buf);
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut places = std::iter::once(PathBuf::new()).chain(above).chain([built]).map(|place| place.join(BUNDLED));
    match places.find(|dir| dir.join("config.json").is_file()) {
        Some(dir) => Ok(dir.canonicalize()?),
        None => bail!("the bundled {BUNDLED} is not found next to this executable: give --model-path"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn the_bundled_model_is_found() {
        assert_eq!(bundled().unwrap(), testing::model_dir().canonicalize().unwrap());
    }

    #[test]
    fn hub_ids_are_distinguished_from_paths() {
        for id in ["Qwen/Qwen3-0.6B", "a/b", "deepseek-ai/DeepSeek-V4-Flash"] {
            assert!(is_hub_id(id), "{id}");
        }
        for path in ["./models/x", "/models/x", "../x/y", "models/x/y", "qwen3", "~/x", "a/b c", "a/", "/b"] {
            assert!(!is_hub_id(path), "{path}");
        }
    }
}
