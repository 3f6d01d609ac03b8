//! GGUF files, version 3: one file or several shards.

mod header;
mod header_error;
mod metadata;
mod reader;
mod shards;
mod tensor_type;
mod value;

#[cfg(test)]
mod tests;

pub use header::{Header, TensorInfo};
pub use header_error::HeaderError;
pub use metadata::Metadata;
pub use shards::{is_model, model_name, shard_names};
pub use tensor_type::{SERVED, TensorType};
pub use value::{Kind, Value};

use crate::error::FilesError;
use std::collections::HashSet;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

/// A tensor, and the file that holds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardTensor {
    /// Index in [`Gguf::files`].
    pub file: usize,
    /// Name, shape and place.
    pub info: TensorInfo,
}

/// The headers of a model in GGUF. No weight is read.
#[derive(Debug)]
pub struct Gguf {
    /// Paths of the shards, in order; one for a model in one file.
    pub files: Vec<PathBuf>,
    /// Key-value pairs of the first shard.
    pub metadata: Metadata,
    /// Tensors of all shards.
    pub tensors: Vec<ShardTensor>,
}

impl Gguf {
    /// Reads the headers of the model with the file `path`: of this file, or of all shards if it is one of them.
    pub fn open(path: &Path) -> Result<Self, FilesError> {
        let files = shards::paths(path);
        let headers = files.iter().map(|path| read_header(path)).collect::<Result<_, _>>()?;
        Self::new(files, headers)
    }

    /// The model with these headers, one for each file.
    pub fn new(files: Vec<PathBuf>, headers: Vec<Header>) -> Result<Self, FilesError> {
        let mut model = Self { files, metadata: Metadata::default(), tensors: Vec::new() };
        let (mut names, count) = (HashSet::new(), headers.len());
        for (i, (path, header)) in model.files.iter().zip(headers).enumerate() {
            shards::check(path, &header.metadata, (i, count))?;
            if i == 0 {
                model.metadata = header.metadata;
            }
            for info in header.tensors {
                if !names.insert(info.name.clone()) {
                    let message = format!("another shard also has the tensor {}", reader::shown(&info.name));
                    return Err(FilesError::damaged(path, message));
                }
                model.tensors.push(ShardTensor { file: i, info });
            }
        }
        shards::check_count(&model.files[0], &model.metadata, model.tensors.len())?;
        Ok(model)
    }

    /// The model family: `general.architecture`.
    pub fn architecture(&self) -> Result<String, FilesError> {
        let invalid = |message: String| FilesError::damaged(&self.files[0], message);
        let architecture = self.metadata.text(header::ARCHITECTURE).map_err(invalid)?;
        architecture.ok_or_else(|| invalid("its metadata has no general.architecture".into()))
    }

    /// A tensor by its name in the file.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.iter().map(|tensor| &tensor.info).find(|info| info.name == name)
    }
}

/// The header of one file.
fn read_header(path: &Path) -> Result<Header, FilesError> {
    let io = |error| FilesError::io(path, error);
    let file = File::open(path).map_err(io)?;
    let bytes = file.metadata().map_err(io)?.len();
    Header::read(BufReader::with_capacity(1 << 20, file), bytes).map_err(|error| match error {
        HeaderError::Io(error) => FilesError::io(path, error),
        HeaderError::Invalid(message) => FilesError::damaged(path, message),
        HeaderError::Unsupported(message) => FilesError::unsupported(path, message),
    })
}
