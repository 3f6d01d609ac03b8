//! A safetensors checkpoint on disk: one file, or shards with an index.

use crate::tensor::OpError;
use half::bf16;
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Why a checkpoint cannot be loaded; each message is one sentence for the user.
#[derive(Debug, Error)]
pub enum WeightsError {
    /// A file cannot be opened or mapped.
    #[error("cannot read {}: {error}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
    /// There are no weights in the directory.
    #[error(
        "{} holds no weights: expected model.safetensors, or model.safetensors.index.json and its shards",
        dir.display()
    )]
    NoWeights {
        /// The directory.
        dir: PathBuf,
    },
    /// A shard named in the index does not exist.
    #[error("{} is missing, but the index names it for {tensor}; download the checkpoint again", path.display())]
    MissingShard {
        /// The shard.
        path: PathBuf,
        /// The first tensor it should hold.
        tensor: String,
    },
    /// A safetensors header or the index is not valid.
    #[error("{} is damaged or truncated ({message}); download it again", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
    /// The model needs a tensor that no file holds.
    #[error("the checkpoint has no tensor {name}; does config.json belong to these weights?")]
    MissingTensor {
        /// Its name.
        name: String,
    },
    /// A tensor does not fit the config.
    #[error("{name} is {found}, but config.json asks for {expected}; does config.json belong to these weights?")]
    Mismatch {
        /// Its name.
        name: String,
        /// Dtype and shape in the file.
        found: String,
        /// Dtype and shape that the model needs.
        expected: String,
    },
    /// The device has no room.
    #[error(
        "cannot allocate {bytes} bytes for {name}: {error}; stop what else uses this memory, or choose another --device"
    )]
    OutOfMemory {
        /// The tensor.
        name: String,
        /// Its size.
        bytes: u64,
        /// What the system said.
        error: std::io::Error,
    },
    /// The device failed.
    #[error("cannot bring the weights to the device: {0}")]
    Device(#[from] OpError),
}

/// Where one tensor lives.
#[derive(Debug, Clone)]
struct Place {
    shard: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Range<usize>,
}

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    file: File,
}

/// An opened checkpoint: every header is read and checked, no weight yet.
#[derive(Debug)]
pub struct Checkpoint {
    shards: Vec<Shard>,
    places: HashMap<String, Place>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Opens `model.safetensors.index.json` and its shards, or `model.safetensors`.
    pub fn open(dir: &Path) -> Result<Self, WeightsError> {
        let index = dir.join("model.safetensors.index.json");
        let files: BTreeMap<String, String> = if index.is_file() {
            let text = std::fs::read_to_string(&index).map_err(|error| io(&index, error))?;
            let index: Index = serde_json::from_str(&text).map_err(|e| damaged(&index, &e))?;
            // Each shard once, with one of its tensors for the error message.
            index.weight_map.into_iter().map(|(tensor, file)| (file, tensor)).collect()
        } else if dir.join("model.safetensors").is_file() {
            BTreeMap::from([("model.safetensors".to_owned(), String::new())])
        } else {
            return Err(WeightsError::NoWeights { dir: dir.to_owned() });
        };
        let mut checkpoint = Self { shards: Vec::new(), places: HashMap::new() };
        for (file, tensor) in files {
            let path = dir.join(&file);
            let found = [Some(path.clone()), other_name(&file).map(|file| dir.join(file))];
            match found.into_iter().flatten().find(|path| path.is_file()) {
                Some(path) => checkpoint.add_shard(&path)?,
                None => return Err(WeightsError::MissingShard { path, tensor }),
            }
        }
        Ok(checkpoint)
    }

    fn add_shard(&mut self, path: &Path) -> Result<(), WeightsError> {
        let file = File::open(path).map_err(|error| io(path, error))?;
        // Mapped for the header alone: pages of weights that are read through a map stay resident.
        // SAFETY: the map is read-only and private, and gone when this function ends; a file that is cut short while its
        // header is read is one that another program is still writing, which every tool warns against.
        let map = unsafe { Mmap::map(&file) }.map_err(|error| io(path, error))?;
        let tensors = SafeTensors::deserialize(&map).map_err(|e| damaged(path, &e))?;
        for (name, view) in tensors.iter() {
            let start = view.data().as_ptr() as usize - map.as_ptr() as usize;
            let place = Place {
                shard: self.shards.len(),
                dtype: view.dtype(),
                shape: view.shape().to_vec(),
                bytes: start..start + view.data().len(),
            };
            self.places.insert(name.to_owned(), place);
        }
        self.shards.push(Shard { path: path.to_owned(), file });
        Ok(())
    }

    /// True when the checkpoint holds this tensor.
    pub fn contains(&self, name: &str) -> bool {
        self.places.contains_key(name)
    }

    /// Names of all tensors, in no order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.places.keys().map(String::as_str)
    }

    /// Dtype and shape of a tensor, if there is one of this name.
    pub fn describe(&self, name: &str) -> Option<(Dtype, &[usize])> {
        self.places.get(name).map(|place| (place.dtype, place.shape.as_slice()))
    }

    /// A bf16 tensor of exactly this shape.
    pub fn bf16(&self, name: &str, shape: &[usize]) -> Result<Stored<'_>, WeightsError> {
        self.stored(name, Dtype::BF16, shape)
    }

    /// A tensor of exactly this dtype and shape. Its bytes come as they are stored, little-endian.
    pub fn stored(&self, name: &str, dtype: Dtype, shape: &[usize]) -> Result<Stored<'_>, WeightsError> {
        self.one_of(name, shape, &[dtype]).map(|(_, stored)| stored)
    }

    /// The values of a small tensor of exactly this shape that may be stored as bf16 or as f32.
    pub fn widened(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, WeightsError> {
        let elements = shape.iter().product();
        match self.one_of(name, shape, &[Dtype::BF16, Dtype::F32])? {
            (Dtype::F32, stored) => {
                let mut values = vec![0f32; elements];
                stored.read(0, bytemuck::cast_slice_mut(&mut values))?;
                Ok(values)
            }
            (_, stored) => {
                let mut values = vec![bf16::ZERO; elements];
                stored.read(0, bytemuck::cast_slice_mut(&mut values))?;
                Ok(values.into_iter().map(bf16::to_f32).collect())
            }
        }
    }

    /// A tensor of exactly this shape and one of these types.
    fn one_of(&self, name: &str, shape: &[usize], dtypes: &[Dtype]) -> Result<(Dtype, Stored<'_>), WeightsError> {
        let place = self.places.get(name).ok_or_else(|| WeightsError::MissingTensor { name: name.to_owned() })?;
        if !dtypes.contains(&place.dtype) || place.shape != shape {
            let dtypes: Vec<String> = dtypes.iter().map(|dtype| format!("{dtype:?}")).collect();
            return Err(WeightsError::Mismatch {
                name: name.to_owned(),
                found: format!("{:?} {:?}", place.dtype, place.shape),
                expected: format!("{} {shape:?}", dtypes.join(" or ")),
            });
        }
        Ok((place.dtype, Stored { shard: &self.shards[place.shard], start: place.bytes.start as u64 }))
    }
}

/// The name that a shard has where tools renamed the files and left the index: `model-00001-of-00002.safetensors` for
/// `model.safetensors-00001-of-00002.safetensors`, and the reverse.
fn other_name(file: &str) -> Option<String> {
    match file.strip_prefix("model.safetensors-") {
        Some(rest) => Some(format!("model-{rest}")),
        None => file.strip_prefix("model-").map(|rest| format!("model.safetensors-{rest}")),
    }
}

/// A tensor in a file of a checkpoint.
#[derive(Debug, Clone, Copy)]
pub struct Stored<'a> {
    shard: &'a Shard,
    /// In the file.
    start: u64,
}

impl Stored<'_> {
    /// Reads `out.len()` bytes of the tensor, from byte `first` on. Any number of threads may read at once.
    ///
    /// Not through a map: a read takes no page faults, leaves nothing resident, and where the file has become shorter
    /// it is an error, not a signal.
    pub fn read(&self, first: usize, out: &mut [u8]) -> Result<(), WeightsError> {
        read_at(&self.shard.file, out, self.start + first as u64).map_err(|error| io(&self.shard.path, error))
    }
}

#[cfg(unix)]
fn read_at(file: &File, out: &mut [u8], first: u64) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, out, first)
}

#[cfg(windows)]
fn read_at(file: &File, mut out: &mut [u8], mut first: u64) -> std::io::Result<()> {
    while !out.is_empty() {
        let n = std::os::windows::fs::FileExt::seek_read(file, out, first)?;
        if n == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        out = &mut std::mem::take(&mut out)[n..];
        first += n as u64;
    }
    Ok(())
}

fn io(path: &Path, error: std::io::Error) -> WeightsError {
    WeightsError::Io { path: path.to_owned(), error }
}

fn damaged(path: &Path, error: &dyn std::fmt::Display) -> WeightsError {
    WeightsError::Damaged { path: path.to_owned(), message: error.to_string() }
}
