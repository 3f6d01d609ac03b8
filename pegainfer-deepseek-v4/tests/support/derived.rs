//! Checkpoints made from the bundled one, in a directory of their own.

use safetensors::tensor::{TensorView, serialize};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Name, dtype, shape and bytes of a tensor.
pub type Stored = (String, Dtype, Vec<usize>, Vec<u8>);

/// A checkpoint that is removed in the end.
pub struct Checkpoint(PathBuf);

impl Drop for Checkpoint {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Checkpoint {
    /// A checkpoint in directory `name`, with tensors computed by `tensors` from the bundled ones, and config.json
    /// modified by `change`.
    pub fn new(
        name: &str,
        tensors: impl FnOnce(&SafeTensors<'_>) -> Vec<Stored>,
        change: impl FnOnce(&mut Value),
    ) -> Self {
        let dir = std::env::temp_dir().join(format!("pegainfer-dsv4-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let from = super::model_path();
        let bytes = std::fs::read(from.join("model.safetensors")).unwrap();
        let tensors = tensors(&SafeTensors::deserialize(&bytes).unwrap());
        let views = tensors.iter().map(|(n, d, s, b)| (n.as_str(), TensorView::new(*d, s.clone(), b).unwrap()));
        std::fs::write(dir.join("model.safetensors"), serialize(views, None).unwrap()).unwrap();
        let mut config = config(&from);
        change(&mut config);
        std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
        Self(dir)
    }

    pub fn path(&self) -> PathBuf {
        self.0.clone()
    }
}

/// config.json of a checkpoint.
pub fn config(dir: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(dir.join("config.json")).unwrap()).unwrap()
}

/// The tensor `name` of `file`, with the name `to`.
pub fn renamed(file: &SafeTensors<'_>, name: &str, to: String) -> Stored {
    let view = file.tensor(name).unwrap();
    (to, view.dtype(), view.shape().to_vec(), view.data().to_vec())
}

/// The rest of `name` after `layer`, if it starts with one of `parts`.
pub fn tail<'a>(name: &'a str, layer: &str, parts: &[&str]) -> Option<&'a str> {
    name.strip_prefix(layer).filter(|tail| parts.iter().any(|part| tail.starts_with(part)))
}
