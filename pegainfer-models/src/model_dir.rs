//! The directory or GGUF file of a checkpoint.

use anyhow::{Context, Result};
use serde_json::Value;
use std::fmt;
use std::path::PathBuf;
use tempfile::TempDir;

/// Directory or GGUF file of a checkpoint, which has to exist until the checkpoint is loaded.
pub struct ModelDir {
    /// Path of the directory or GGUF file.
    pub dir: PathBuf,
    /// Hugging Face id of a downloaded checkpoint.
    pub hub_id: Option<String>,
    /// Name of the checkpoint, if it differs from the path's.
    pub(super) name: Option<String>,
    /// Temporary files, removed with this value.
    pub(super) _temporary: Option<TempDir>,
}

impl ModelDir {
    /// Hugging Face id or absolute path, from which other programs can read the checkpoint; `None` for temporary files.
    pub fn origin(&self) -> Option<String> {
        if self._temporary.is_some() {
            return None;
        }
        self.hub_id.clone().or_else(|| Some(std::path::absolute(&self.dir).ok()?.to_string_lossy().into_owned()))
    }
}

impl fmt::Display for ModelDir {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => name.fmt(f),
            None => self.dir.display().fmt(f),
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn model_dir(dir: &str, hub_id: Option<&str>) -> ModelDir {
        ModelDir { dir: dir.into(), hub_id: hub_id.map(str::to_owned), name: None, _temporary: None }
    }

    #[test]
    fn others_read_a_checkpoint_by_its_id_or_path() {
        assert_eq!(model_dir("/cache/models--a--b", Some("a/b")).origin().as_deref(), Some("a/b"));
        let absolute = std::path::absolute("models/x").unwrap();
        assert_eq!(model_dir("models/x", None).origin().as_deref(), absolute.to_str());
        assert_eq!(from_config(&Value::Null, "x").unwrap().origin(), None);
    }
}
