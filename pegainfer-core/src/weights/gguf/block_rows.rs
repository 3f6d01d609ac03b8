//! Rows of blocks, read as codes and scales or as the bf16 values next to them.

use super::block_type::BlockType;
use super::blocks::repack;
use crate::weights::error::WeightsError;
use half::bf16;
use std::ops::Range;

/// Reads bytes of the stored rows from this byte on.
pub(crate) type ReadBytes<'a> = dyn Fn(usize, &mut [u8]) -> Result<(), WeightsError> + 'a;

/// Some columns of a matrix that is stored in blocks.
#[derive(Debug, Clone, Copy)]
pub struct BlockRows {
    blocks: BlockType,
    /// Columns of the stored matrix.
    row: usize,
    /// Tiles of the columns, of which the same columns are read.
    tiles: usize,
    /// The first column of a tile that is read.
    first: usize,
    /// Number of columns of a tile that are read.
    width: usize,
}

impl BlockRows {
    /// All columns of rows of `row` values, in `tiles` tiles.
    pub(crate) fn new(blocks: BlockType, row: usize, tiles: usize) -> Self {
        Self { blocks, row, tiles, first: 0, width: row / tiles }
    }

    /// The same rows, only these columns: an equal part of each tile.
    pub(crate) fn columns(self, columns: Range<usize>) -> Self {
        Self { first: columns.start / self.tiles, width: columns.len() / self.tiles, ..self }
    }

    /// The first column of a tile that is read.
    fn start(&self, tile: usize) -> usize {
        tile * (self.row / self.tiles) + self.first
    }

    /// Bytes of a stored row.
    pub(crate) fn row_bytes(&self) -> usize {
        self.blocks.row_bytes(self.row)
    }

    /// Reads values from byte `first` of the chosen columns on, rounded to bf16; `read` reads the stored rows.
    pub(crate) fn read_bf16(
        &self,
        first: usize,
        out: &mut [u8],
        read: impl Fn(usize, &mut [u8]) -> Result<(), WeightsError>,
    ) -> Result<(), WeightsError> {
        let block = self.blocks.kind().block_values();
        let (mut element, mut out) = (first / 2, out);
        let mut scratch = Scratch::default();
        while out.len() >= 2 {
            let (tile, skipped) = (element / self.width, element % self.width);
            let (row, tile) = (tile / self.tiles, tile % self.tiles);
            let count = (self.width - skipped).min(out.len() / 2);
            let (part, rest) = out.split_at_mut(2 * count);
            // Whole blocks around the columns.
            let start = self.start(tile) + skipped;
            let end = start + count;
            let (start_block, end_block) = (start / block * block, end.next_multiple_of(block));
            let values = scratch.values(self, (row, start_block..end_block), &read)?;
            for (value, out) in values[start - start_block..].iter().zip(part.chunks_exact_mut(2)) {
                out.copy_from_slice(&bf16::from_f32(*value).to_le_bytes());
            }
            element += count;
            out = rest;
        }
        Ok(())
    }

    /// Reads the codes and scales of a row's chosen columns, which are whole blocks. `codes` and `scales`: the bytes of a
    /// row of so many columns.
    pub(crate) fn read_row(
        &self,
        row: usize,
        (codes, scales): (&mut [u8], &mut [u8]),
        buffer: &mut Vec<u8>,
        read: &ReadBytes<'_>,
    ) -> Result<(), WeightsError> {
        let bytes = |columns: usize| self.blocks.row_bytes(columns);
        buffer.resize(self.tiles * bytes(self.width), 0);
        for (tile, part) in buffer.chunks_exact_mut(bytes(self.width)).enumerate() {
            read(row * self.row_bytes() + bytes(self.start(tile)), part)?;
        }
        repack(self.blocks, self.tiles * self.width, buffer, codes, scales);
        Ok(())
    }

    /// Reads the blocks of some columns of a row.
    fn read_blocks(
        &self,
        row: usize,
        columns: Range<usize>,
        buffer: &mut Vec<u8>,
        read: &ReadBytes<'_>,
    ) -> Result<(), WeightsError> {
        let bytes = |columns: usize| self.blocks.row_bytes(columns);
        buffer.resize(bytes(columns.len()), 0);
        read(row * self.row_bytes() + bytes(columns.start), buffer)
    }
}

/// Memory of a row.
#[derive(Default)]
struct Scratch {
    blocks: Vec<u8>,
    codes: Vec<u8>,
    scales: Vec<u8>,
    values: Vec<f32>,
}

impl Scratch {
    /// The values of some whole blocks of a row.
    fn values(
        &mut self,
        rows: &BlockRows,
        (row, columns): (usize, Range<usize>),
        read: &ReadBytes<'_>,
    ) -> Result<&[f32], WeightsError> {
        let (k, format) = (columns.len(), rows.blocks.format());
        rows.read_blocks(row, columns, &mut self.blocks, read)?;
        self.codes.resize(format.code_bytes(k), 0);
        self.scales.resize(format.scale_bytes(k), 0);
        self.values.resize(k, 0.0);
        repack(rows.blocks, k, &self.blocks, &mut self.codes, &mut self.scales);
        format.dequantize_row(&self.codes, &self.scales, k, &mut self.values);
        Ok(&self.values)
    }
}
