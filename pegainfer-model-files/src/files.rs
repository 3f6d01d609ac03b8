//! The files of a model by name, whether it is a folder or GGUF.

use crate::error::FilesError;
use crate::from_metadata;
use crate::gguf::{self, Gguf};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Weights in a folder that is not GGUF.
const SAFETENSORS: [&str; 2] = ["model.safetensors.index.json", "model.safetensors"];

/// A model on disk.
#[derive(Debug)]
pub enum ModelFiles {
    /// A folder in Hugging Face's layout.
    Folder(PathBuf),
    /// The headers of a model in GGUF. Boxed, because they are larger.
    Gguf(Box<Gguf>),
}

impl ModelFiles {
    /// Opens a folder, or the GGUF file `path`, or the only GGUF model in the folder `path` if that has no safetensors.
    /// Files next to a model (`mmproj-*`, `mtp-*`, `imatrix*`) are not models. Several shards are one model.
    ///
    /// # Errors
    /// A GGUF file that is damaged or of a kind that is not served, or a folder with several models. A folder is not
    /// read here and cannot fail.
    pub fn open(path: &Path) -> Result<Self, FilesError> {
        match gguf_file(path)? {
            Some(file) => Self::from_gguf(Gguf::open(&file)?),
            None => Ok(Self::Folder(path.to_owned())),
        }
    }

    /// The model with these headers.
    ///
    /// # Errors
    /// An architecture, or weights of a type, that is not served.
    pub fn from_gguf(gguf: Gguf) -> Result<Self, FilesError> {
        from_metadata::check(&gguf)?;
        Ok(Self::Gguf(Box::new(gguf)))
    }

    /// The text of the model's file `name`, such as `config.json`; `None` if there is no such file. GGUF has
    /// `config.json`, `generation_config.json`, `tokenizer.json` and `tokenizer_config.json`, whose `chat_template` is
    /// the metadata's.
    pub fn read(&self, name: &str) -> Result<Option<String>, FilesError> {
        match self {
            Self::Folder(dir) => {
                let path = dir.join(name);
                match std::fs::read_to_string(&path) {
                    Ok(text) => Ok(Some(text)),
                    Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
                    Err(error) => Err(FilesError::io(&path, error)),
                }
            }
            Self::Gguf(gguf) => from_metadata::file(gguf, name),
        }
    }

    /// The path of `name` in messages: inside of the folder, or the GGUF file.
    pub fn path(&self, name: &str) -> PathBuf {
        match self {
            Self::Folder(dir) => dir.join(name),
            Self::Gguf(gguf) => gguf.files[0].clone(),
        }
    }
}

/// The text of the file `name` of the model at `path`, see [`ModelFiles::open`] and [`ModelFiles::read`].
pub fn read(path: &Path, name: &str) -> Result<Option<String>, FilesError> {
    ModelFiles::open(path)?.read(name)
}

/// The first GGUF file of the model at `path`; `None` for a folder in Hugging Face's layout.
fn gguf_file(path: &Path) -> Result<Option<PathBuf>, FilesError> {
    if path.is_file() {
        return Ok(Some(path.to_owned()));
    }
    if SAFETENSORS.iter().any(|name| path.join(name).is_file()) {
        return Ok(None);
    }
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut files: Vec<String> = names.filter(|name| gguf::is_model(name)).collect();
    files.sort_unstable();
    match files.as_slice() {
        [] => Ok(None),
        [file] => Ok(Some(path.join(file))),
        _ => {
            files.truncate(2);
            Err(FilesError::Several { dir: path.to_owned(), files })
        }
    }
}
