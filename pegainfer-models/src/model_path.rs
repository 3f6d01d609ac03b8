//! Resolves `--model-path` to a directory.

use crate::args::{EngineArgs, LoadFormat};
use crate::{bundled, detect};
use anyhow::{Context, Result, bail};
use pegainfer_hub::Hub;
use pegainfer_runtime::Overrides;
use serde_json::Value;
use std::fmt;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Directory or GGUF file of a checkpoint, which has to exist until the checkpoint is loaded.
pub struct ModelDir {
    /// Path of the directory or GGUF file.
    pub dir: PathBuf,
    /// Hugging Face id of a downloaded checkpoint.
    pub hub_id: Option<String>,
    /// Name of the checkpoint, if it differs from the path's.
    name: Option<String>,
    /// Temporary files, removed with this value.
    _temporary: Option<TempDir>,
}

impl fmt::Display for ModelDir {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => name.fmt(f),
            None => self.dir.display().fmt(f),
        }
    }
}

/// Finds the checkpoint, downloading it if `--model-path` is a Hugging Face id.
pub fn resolve(args: &EngineArgs) -> Result<ModelDir> {
    find(args.model_path.as_deref(), args.load_format == LoadFormat::Auto, &args.overrides())
}

/// Like [`resolve`], for commands without weights: these are not downloaded.
pub fn resolve_config(model_path: Option<&str>) -> Result<ModelDir> {
    find(model_path, false, &Overrides::default())
}

/// A directory with the config.json of the model `name`, for commands without weights.
pub fn from_config(config: &Value, name: &str) -> Result<ModelDir> {
    let parent = std::env::temp_dir();
    let written = || -> std::io::Result<TempDir> {
        let temporary = tempfile::Builder::new().prefix("pegainfer-").tempdir_in(&parent)?;
        std::fs::write(temporary.path().join("config.json"), config.to_string())?;
        Ok(temporary)
    };
    let unwritable = || format!("{} cannot be written: set TMPDIR to another directory", parent.display());
    let temporary = written().with_context(unwritable)?;
    let (dir, name) = (temporary.path().to_owned(), Some(name.to_owned()));
    Ok(ModelDir { dir, hub_id: None, name, _temporary: Some(temporary) })
}

fn find(model_path: Option<&str>, weights: bool, overrides: &Overrides) -> Result<ModelDir> {
    let Some(given) = model_path else {
        let files = bundled::write()?;
        let (dir, name) = (files.path().join(bundled::NAME), Some(format!("the bundled {}", bundled::NAME)));
        return Ok(ModelDir { dir, hub_id: None, name, _temporary: Some(files) });
    };
    let dir = PathBuf::from(given);
    if dir.is_dir() || is_gguf(&dir) {
        return Ok(ModelDir { dir, hub_id: None, name: None, _temporary: None });
    }
    if dir.exists() {
        bail!("--model-path {given} is a file: give the directory that holds config.json, or a .gguf file");
    }
    if !is_hub_id(given) {
        bail!(
            "--model-path {given} is neither a directory, a .gguf file nor a Hugging Face id such as Qwen/Qwen3-0.6B"
        );
    }
    let dir = Hub::from_env().fetch(given, weights, &|config| check(config, overrides))?;
    Ok(ModelDir { dir, hub_id: Some(given.to_owned()), name: None, _temporary: None })
}

/// Refuses a text of config.json, with overrides, that no engine serves.
fn check(config: &str, overrides: &Overrides) -> Result<(), String> {
    let family = detect::in_config(config, "config.json".into()).map_err(|error| error.to_string())?;
    (family.check)(config, overrides).map_err(|error| format!("{error:#}"))
}

/// True for a file with the extension of GGUF.
fn is_gguf(path: &Path) -> bool {
    path.is_file() && path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

/// True if the text is `organisation/name`, in characters that the hub allows, perhaps with the quantisation of a GGUF
/// file: `organisation/name:Q4_K_M`.
fn is_hub_id(text: &str) -> bool {
    let valid = |part: &str| {
        !part.is_empty()
            && !part.starts_with(['.', '-', '~'])
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
    };
    let (id, quantization) = text.split_once(':').map_or((text, None), |(id, end)| (id, Some(end)));
    quantization.is_none_or(valid) && id.split_once('/').is_some_and(|(owner, name)| valid(owner) && valid(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hub_ids_are_distinguished_from_paths() {
        for id in ["Qwen/Qwen3-0.6B", "a/b", "deepseek-ai/DeepSeek-V4-Flash", "unsloth/Qwen3-8B-GGUF:Q4_K_M"] {
            assert!(is_hub_id(id), "{id}");
        }
        for path in
            ["./models/x", "/models/x", "../x/y", "models/x/y", "qwen3", "~/x", "a/b c", "a/", "/b", "a/b:", "a/b:c/d"]
        {
            assert!(!is_hub_id(path), "{path}");
        }
    }
}
