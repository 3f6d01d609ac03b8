//! Files of a model: a folder in Hugging Face's layout, or a GGUF file.
//!
//! A GGUF file holds what a folder spreads over config.json, generation_config.json, tokenizer.json and
//! tokenizer_config.json. [`ModelFiles`] makes these files from its metadata, in memory, so code that reads a folder's
//! files also reads GGUF. pegainfer-core reads the weights.
//!
//! # Layout
//! - [`gguf`]: the parser of the format, for files from strangers: header, metadata, tensor table, shards.
//! - `files`: [`ModelFiles`], and the choice between folder and GGUF.
//! - `from_metadata`: the folder's files as GGUF metadata says them.
//!
//! # Example
//! ```
//! use pegainfer_model_files::ModelFiles;
//!
//! let dir = pegainfer_testing::model_dir();
//! let files = ModelFiles::open(&dir)?;
//! assert!(files.read("config.json")?.is_some_and(|text| text.contains("Qwen3ForCausalLM")));
//! assert_eq!(files.read("no such file")?, None);
//! # Ok::<(), pegainfer_model_files::FilesError>(())
//! ```

mod error;
mod files;
mod from_metadata;
pub mod gguf;

pub use error::FilesError;
pub use files::{ModelFiles, read};
pub use from_metadata::{Weight, check_architecture, weight};
