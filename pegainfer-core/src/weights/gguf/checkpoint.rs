//! GGUF files as a checkpoint: tensors under the names that they have in safetensors.

use super::block_rows::BlockRows;
use super::block_type::BlockType;
use crate::weights::checkpoint::{Checkpoint, Location};
use crate::weights::error::{WeightsError, damaged, io};
use crate::weights::stored::Shard;
use pegainfer_model_files::gguf::{Gguf, TensorType};
use pegainfer_model_files::{Weight, weight};
use rayon::prelude::*;
use safetensors::Dtype;
use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;

impl Checkpoint {
    /// The checkpoint with these headers. Tensors that are not part of the model keep their names.
    pub(in crate::weights) fn open_gguf(gguf: &Gguf) -> Result<Self, WeightsError> {
        let open = |path: &std::path::PathBuf| {
            let file = File::open(path).map_err(|error| io(path, error))?;
            Ok(Shard { path: path.clone(), file, bytes_read: Default::default() })
        };
        let shards = gguf.files.iter().map(open).collect::<Result<Vec<_>, WeightsError>>()?;
        let mut locations = HashMap::new();
        for tensor in &gguf.tensors {
            let info = &tensor.info;
            let (dtype, blocks) = match (info.kind, BlockType::new(info.kind)) {
                (TensorType::F32, _) => (Dtype::F32, None),
                (TensorType::F16, _) => (Dtype::F16, None),
                (TensorType::BF16, _) => (Dtype::BF16, None),
                (_, Some(blocks)) => (Dtype::U8, Some(blocks)),
                // Weights of the model have types that are served.
                _ => continue,
            };
            let unmapped = || Weight { name: info.name.clone(), shape: info.shape.clone(), tiles: 1 };
            let Weight { name, shape, tiles } = weight(gguf, info)?.unwrap_or_else(unmapped);
            let bytes = info.start as usize..(info.start + info.bytes) as usize;
            let location = Location { shard: tensor.file, dtype, blocks, shape, tiles, bytes };
            if locations.insert(name, location).is_some() {
                let message = format!("{} is there under two names", info.name);
                return Err(damaged(&gguf.files[tensor.file], &message));
            }
        }
        Ok(Self { shards, locations })
    }

    /// Type of the blocks of a quantised tensor; `None` for others.
    pub fn block_type(&self, name: &str) -> Option<BlockType> {
        self.locations.get(name)?.blocks
    }

    /// Tiles of the columns of a tensor, see [`Weight`].
    pub(in crate::weights) fn tiles(&self, name: &str) -> usize {
        self.locations.get(name).map_or(1, |location| location.tiles)
    }

    /// Reads codes and scales of some rows and columns of the quantised matrix `name`, on rayon's threads; columns are
    /// whole blocks. `codes` and `scales` are rows of the block's format with these columns.
    pub(in crate::weights) fn read_blocks(
        &self,
        name: &str,
        rows: Range<usize>,
        columns: Range<usize>,
        (codes, scales): (&mut [u8], &mut [u8]),
    ) -> Result<(), WeightsError> {
        let missing = || WeightsError::MissingTensor { name: name.to_owned() };
        let location = self.locations.get(name).ok_or_else(missing)?;
        let blocks = location.blocks.ok_or_else(missing)?;
        let stored = self.stored(name, location.dtype, &location.shape)?;
        let k = location.shape[location.shape.len() - 1];
        let (format, width) = (blocks.format(), columns.len());
        let columns = BlockRows::new(blocks, k, location.tiles).columns(columns);
        let read = |first: usize, out: &mut [u8]| stored.read_whole(first, out);
        let planes = codes.par_chunks_exact_mut(format.code_bytes(width));
        let planes = planes.zip(scales.par_chunks_exact_mut(format.scale_bytes(width))).enumerate();
        planes.try_for_each_init(Vec::new, |buffer, (row, planes)| {
            columns.read_row(rows.start + row, planes, buffer, &read)
        })
    }
}
