//! Resolves `--model-path` to a directory.

use crate::args::{EngineArgs, LoadFormat};
use crate::{bundled, detect};
use anyhow::{Context, Result, anyhow, bail, ensure};
use pegainfer_hub::{Hub, HubError};
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
    let given = with_revision(args.model_path.as_deref(), args.revision.as_deref())?;
    find(given.as_deref(), args.load_format == LoadFormat::Auto, &args.overrides())
}

/// Downloads the model with this Hugging Face id, and returns its directory or GGUF file.
pub fn pull(id: &str, revision: Option<&str>) -> Result<PathBuf> {
    let id = with_revision(Some(id), revision)?.unwrap_or_default();
    ensure!(is_hub_id(&id), "{id} is not a Hugging Face id such as Qwen/Qwen3-0.6B");
    Ok(download(&id, true, &Overrides::default())?)
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
    let dir = download(given, weights, overrides).map_err(|error| match error {
        // It may also be a misspelt path.
        HubError::NotFound { .. } | HubError::Unreachable { .. } | HubError::Offline { .. } => {
            anyhow!("{error}; and there is no directory {given} here")
        }
        error => error.into(),
    })?;
    Ok(ModelDir { dir, hub_id: Some(given.to_owned()), name: None, _temporary: None })
}

fn download(id: &str, weights: bool, overrides: &Overrides) -> Result<PathBuf, HubError> {
    Hub::from_env().fetch(id, weights, &|config| check(config, overrides))
}

/// The id with the revision of `--revision`.
fn with_revision(model: Option<&str>, revision: Option<&str>) -> Result<Option<String>> {
    let (Some(revision), model) = (revision, model.unwrap_or_default()) else { return Ok(model.map(str::to_owned)) };
    ensure!(
        is_hub_id(model) && !Path::new(model).exists() && !model.contains('@'),
        "--revision {revision} is for a Hugging Face id without one, such as Qwen/Qwen3-0.6B"
    );
    let (repo, quantization) = model.find(':').map_or((model, ""), |at| model.split_at(at));
    Ok(Some(format!("{repo}@{revision}{quantization}")))
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

/// True if the text is `organisation/name`, in characters that the hub allows, perhaps with a revision and the
/// quantisation of a GGUF file: `organisation/name@REVISION:Q4_K_M`.
fn is_hub_id(text: &str) -> bool {
    let valid = |part: &str| {
        !part.is_empty()
            && !part.starts_with(['.', '-', '~'])
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
    };
    let (id, quantization) = text.split_once(':').map_or((text, None), |(id, end)| (id, Some(end)));
    let (id, revision) = id.split_once('@').map_or((id, None), |(id, end)| (id, Some(end)));
    [quantization, revision].into_iter().flatten().all(valid)
        && id.split_once('/').is_some_and(|(owner, name)| valid(owner) && valid(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hub_ids_are_distinguished_from_paths() {
        for id in
            ["Qwen/Qwen3-0.6B", "a/b", "deepseek-ai/DeepSeek-V4-Flash", "unsloth/Qwen3-8B-GGUF:Q4_K_M", "a/b@v1:Q4"]
        {
            assert!(is_hub_id(id), "{id}");
        }
        for path in [
            "./models/x",
            "/models/x",
            "../x/y",
            "models/x/y",
            "qwen3",
            "~/x",
            "a/b c",
            "a/",
            "/b",
            "a/b:",
            "a/b:c/d",
            "a/b@",
            "a/b@..",
        ] {
            assert!(!is_hub_id(path), "{path}");
        }
    }
}
