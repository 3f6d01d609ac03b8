//! A checkpoint on disk: safetensors, as one file or shards with an index, or GGUF.

use super::error::{WeightsError, damaged, io};
use super::gguf::BlockType;
use super::stored::{Shard, Stored, same_bytes};
use half::{bf16, f16};
use memmap2::Mmap;
use pegainfer_model_files::ModelFiles;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// Dtypes of weights that are not quantized.
const FLOATS: [Dtype; 3] = [Dtype::BF16, Dtype::F16, Dtype::F32];

/// Beginning of a file that git-lfs has not replaced by its content yet.
const LFS_POINTER: &[u8] = b"version https://git-lfs";

/// Location of one tensor.
#[derive(Debug, Clone)]
pub(super) struct Location {
    pub shard: usize,
    /// Dtype of the elements; of the bytes of [`blocks`](Self::blocks).
    pub dtype: Dtype,
    /// Type of the blocks of a quantised tensor in GGUF.
    pub blocks: Option<BlockType>,
    pub shape: Vec<usize>,
    /// Tiles of the columns, see [`Weight`](pegainfer_model_files::Weight).
    pub tiles: usize,
    pub bytes: Range<usize>,
}

impl Location {
    /// Type and shape, for messages.
    fn described(&self) -> String {
        match self.blocks {
            Some(blocks) => format!("{blocks} {:?}", self.shape),
            None => format!("{:?} {:?}", self.dtype, self.shape),
        }
    }
}

/// An opened checkpoint: all headers are read and checked; no weight is read yet.
#[derive(Debug)]
pub struct Checkpoint {
    pub(super) shards: Vec<Shard>,
    pub(super) locations: HashMap<String, Location>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Opens a GGUF file or the folder `path`: `model.safetensors.index.json` and its shards, or `model.safetensors`, or
    /// the only model in GGUF. Tensors of GGUF files get the names that they have in safetensors.
    pub fn open(path: &Path) -> Result<Self, WeightsError> {
        match ModelFiles::open(path)? {
            ModelFiles::Folder(dir) => Self::open_safetensors(&dir),
            ModelFiles::Gguf(gguf) => Self::open_gguf(&gguf),
        }
    }

    /// Opens one file in safetensors, such as that of an adapter.
    pub fn open_file(path: &Path) -> Result<Self, WeightsError> {
        let mut checkpoint = Self { shards: Vec::new(), locations: HashMap::new() };
        checkpoint.add_shard(path)?;
        Ok(checkpoint)
    }

    fn open_safetensors(dir: &Path) -> Result<Self, WeightsError> {
        let index = dir.join("model.safetensors.index.json");
        let files: BTreeMap<String, String> = if index.is_file() {
            let text = std::fs::read_to_string(&index).map_err(|error| io(&index, error))?;
            let index: Index = serde_json::from_str(&text).map_err(|e| damaged(&index, &e))?;
            // One entry per shard, with one of its tensors for the error message.
            index.weight_map.into_iter().map(|(tensor, file)| (file, tensor)).collect()
        } else if dir.join("model.safetensors").is_file() {
            BTreeMap::from([("model.safetensors".to_owned(), String::new())])
        } else {
            return Err(WeightsError::NoWeights { dir: dir.to_owned() });
        };
        let mut checkpoint = Self { shards: Vec::new(), locations: HashMap::new() };
        for (file, tensor) in files {
            if !is_file_name(&file) {
                return Err(WeightsError::NoFileName { index, file });
            }
            let path = dir.join(&file);
            let found = [Some(path.clone()), other_name(&file).map(|file| dir.join(file))];
            match found.into_iter().flatten().find(|path| path.is_file()) {
                Some(path) => checkpoint.add_shard(&path)?,
                None => return Err(WeightsError::MissingShard { path, tensor }),
            }
        }
        checkpoint.name_as_in_a_causal_model();
        Ok(checkpoint)
    }

    /// Models of vectors are saved without the output matrix, and without the prefix of all other tensors.
    fn name_as_in_a_causal_model(&mut self) {
        const PREFIX: &str = "model.";
        if self.contains("embed_tokens.weight") && !self.names().any(|name| name.starts_with(PREFIX)) {
            let locations = std::mem::take(&mut self.locations).into_iter();
            self.locations = locations.map(|(name, location)| (format!("{PREFIX}{name}"), location)).collect();
        }
    }

    fn add_shard(&mut self, path: &Path) -> Result<(), WeightsError> {
        let file = File::open(path).map_err(|error| io(path, error))?;
        // Maps only the header: pages of weights read through a map would stay resident.
        // SAFETY: the map is read-only, private and dropped at the end of this function. A file truncated meanwhile is
        // still being written by another program, which is an error of the user.
        let map = unsafe { Mmap::map(&file) }.map_err(|error| io(path, error))?;
        if map.starts_with(LFS_POINTER) {
            return Err(WeightsError::LfsPointer { path: path.to_owned() });
        }
        let tensors = SafeTensors::deserialize(&map).map_err(|e| damaged(path, &e))?;
        for (name, view) in tensors.iter() {
            let start = view.data().as_ptr() as usize - map.as_ptr() as usize;
            let location = Location {
                shard: self.shards.len(),
                dtype: view.dtype(),
                blocks: None,
                shape: view.shape().to_vec(),
                tiles: 1,
                bytes: start..start + view.data().len(),
            };
            self.locations.insert(name.to_owned(), location);
        }
        self.shards.push(Shard { path: path.to_owned(), file, bytes_read: AtomicU64::new(0) });
        Ok(())
    }

    /// True if the checkpoint has this tensor.
    pub fn contains(&self, name: &str) -> bool {
        self.locations.contains_key(name)
    }

    /// Names of all tensors, in no particular order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.locations.keys().map(String::as_str)
    }

    /// Bytes of tensors that were read from the files so far; a byte that was read twice counts twice.
    pub fn bytes_read(&self) -> u64 {
        self.shards.iter().map(|shard| shard.bytes_read.load(Ordering::Relaxed)).sum()
    }

    /// Dtype and shape of a tensor; `None` if there is no tensor of this name. A quantised tensor of a GGUF file is U8
    /// with the shape of its values, see [`block_type`](Self::block_type).
    pub fn describe(&self, name: &str) -> Option<(Dtype, &[usize])> {
        self.locations.get(name).map(|location| (location.dtype, location.shape.as_slice()))
    }

    /// A tensor of exactly this shape, read as bf16. Tensors in f32 or f16 and the values of quantised ones are rounded
    /// to nearest even while they are read.
    pub fn bf16(&self, name: &str, shape: &[usize]) -> Result<Stored<'_>, WeightsError> {
        if let Some(blocks) = self.block_type(name) {
            return Ok(self.one_of(name, shape, &[Dtype::U8])?.1.dequantized(blocks, shape[shape.len() - 1]));
        }
        let (dtype, stored) = self.one_of(name, shape, &FLOATS)?;
        Ok(stored.rounded(dtype))
    }

    /// True if two tensors have the same dtype, shape and bytes.
    ///
    /// Threads compare parts of the tensors and stop at the first difference, so different tensors cost few reads.
    pub fn equal(&self, a: &str, b: &str) -> Result<bool, WeightsError> {
        let find = |name: &str| {
            let location = self.locations.get(name);
            location.ok_or_else(|| WeightsError::MissingTensor { name: name.to_owned() })
        };
        let (one, other) = (find(a)?, find(b)?);
        if (one.dtype, one.blocks, &one.shape) != (other.dtype, other.blocks, &other.shape) {
            return Ok(false);
        }
        let stored = |location: &Location| {
            Stored::new(&self.shards[location.shard], location.bytes.start as u64, location.dtype)
        };
        same_bytes([stored(one), stored(other)], one.bytes.len())
    }

    /// A tensor of exactly this dtype and shape. Its bytes are read as stored, little-endian.
    pub fn stored(&self, name: &str, dtype: Dtype, shape: &[usize]) -> Result<Stored<'_>, WeightsError> {
        self.one_of(name, shape, &[dtype]).map(|(_, stored)| stored)
    }

    /// The values of a small tensor of exactly this shape, stored as bf16, f16 or f32.
    pub fn widened(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, WeightsError> {
        let elements = shape.iter().product();
        match self.one_of(name, shape, &FLOATS)? {
            (Dtype::F32, stored) => {
                let mut values = vec![0f32; elements];
                stored.read(0, bytemuck::cast_slice_mut(&mut values))?;
                Ok(values)
            }
            (Dtype::F16, stored) => {
                let mut values = vec![f16::ZERO; elements];
                stored.read(0, bytemuck::cast_slice_mut(&mut values))?;
                Ok(values.into_iter().map(f16::to_f32).collect())
            }
            (_, stored) => {
                let mut values = vec![bf16::ZERO; elements];
                stored.read(0, bytemuck::cast_slice_mut(&mut values))?;
                Ok(values.into_iter().map(bf16::to_f32).collect())
            }
        }
    }

    /// A tensor of exactly this shape and one of these dtypes.
    fn one_of(&self, name: &str, shape: &[usize], dtypes: &[Dtype]) -> Result<(Dtype, Stored<'_>), WeightsError> {
        let location = self.locations.get(name).ok_or_else(|| WeightsError::MissingTensor { name: name.to_owned() })?;
        if !dtypes.contains(&location.dtype) || !(location.shape == shape || is_stack(&location.shape, shape)) {
            let dtypes: Vec<String> = match location.blocks {
                Some(blocks) if dtypes.contains(&location.dtype) => vec![blocks.to_string()],
                _ => dtypes.iter().map(|dtype| format!("{dtype:?}")).collect(),
            };
            return Err(WeightsError::Mismatch {
                name: name.to_owned(),
                found: location.described(),
                expected: format!("{} {shape:?}", dtypes.join(" or ")),
            });
        }
        let stored = Stored::new(&self.shards[location.shard], location.bytes.start as u64, location.dtype);
        Ok((location.dtype, stored.tiled(location.tiles)))
    }
}

/// True if `stored`, `[n, rows, k]`, is a stack of matrices that `wanted`, `[n * rows, k]`, takes as one.
fn is_stack(stored: &[usize], wanted: &[usize]) -> bool {
    matches!((stored, wanted), ([n, rows, k], [all, columns]) if n.checked_mul(*rows) == Some(*all) && k == columns)
}

/// Alternative name of a shard: some tools rename the files without updating the index, from
/// `model.safetensors-00001-of-00002.safetensors` to `model-00001-of-00002.safetensors` or the reverse.
fn other_name(file: &str) -> Option<String> {
    match file.strip_prefix("model.safetensors-") {
        Some(rest) => Some(format!("model-{rest}")),
        None => file.strip_prefix("model-").map(|rest| format!("model.safetensors-{rest}")),
    }
}

/// True if this names a file directly in a directory.
pub fn is_file_name(file: &str) -> bool {
    Path::new(file).file_name().is_some_and(|name| name == file)
}
