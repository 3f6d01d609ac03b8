//! Tensors in the files of a checkpoint, read in parts by any number of threads.

use super::error::{WeightsError, io};
use super::gguf::{BlockRows, BlockType};
use half::{bf16, f16};
use safetensors::Dtype;
use std::fs::File;
use std::ops::Range;
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Number of bytes read and converted at a time, so that they stay in the L2 cache.
const CONVERT_CHUNK: usize = 128 << 10;
/// Bytes of each tensor that a thread compares at a time.
const COMPARE_CHUNK: usize = 1 << 20;
/// Maximum number of threads that compare two tensors; they share the bandwidth of a disk or of the page cache.
const COMPARE_THREADS: usize = 8;

/// A file of a checkpoint.
#[derive(Debug)]
pub(super) struct Shard {
    pub path: PathBuf,
    pub file: File,
    /// Bytes of tensors that were read from it.
    pub bytes_read: AtomicU64,
}

/// A tensor in a file of a checkpoint.
#[derive(Debug, Clone, Copy)]
pub struct Stored<'a> {
    shard: &'a Shard,
    /// Offset in the file, in bytes.
    start: u64,
    /// Bytes of an element as stored.
    element: usize,
    /// Tiles of the columns of a matrix, of which the same columns are read.
    tiles: usize,
    /// Bytes of each row that belong to the tensor; `None` for all.
    columns: Option<Columns>,
    /// Format of elements that are converted while they are read; `None` reads bytes as they are stored.
    converts: Option<Wide>,
    /// Blocks of a quantised matrix whose values are rounded to bf16 while they are read.
    blocks: Option<BlockRows>,
}

/// Some columns of a stored matrix, in bytes.
#[derive(Debug, Clone, Copy)]
struct Columns {
    /// Length of a row.
    row: usize,
    /// Offset of the columns in a tile.
    first: usize,
    /// Length of the columns of a tile.
    width: usize,
}

/// Format of an element that is converted while it is read.
#[derive(Debug, Clone, Copy)]
enum Wide {
    /// Becomes bf16.
    F16,
    /// Becomes bf16.
    F32,
    /// Becomes u32; numbers that u32 does not have become its largest one.
    I64,
}

impl Wide {
    /// Bytes of an element as stored.
    fn size(self) -> usize {
        match self {
            Self::F16 => size_of::<f16>(),
            Self::F32 => size_of::<f32>(),
            Self::I64 => size_of::<i64>(),
        }
    }

    /// Bytes of a converted element.
    fn converted(self) -> usize {
        match self {
            Self::F16 | Self::F32 => size_of::<bf16>(),
            Self::I64 => size_of::<u32>(),
        }
    }

    /// Converts the elements of `from`, little-endian; bf16 is rounded to nearest even.
    fn convert(self, from: &[u8], out: &mut [u8]) {
        match self {
            Self::F16 => from.as_chunks().0.iter().zip(out.as_chunks_mut().0).for_each(|(from, out)| {
                *out = bf16::from_f32(f16::from_le_bytes(*from).to_f32()).to_le_bytes();
            }),
            Self::F32 => from.as_chunks().0.iter().zip(out.as_chunks_mut().0).for_each(|(from, out)| {
                *out = bf16::from_f32(f32::from_le_bytes(*from)).to_le_bytes();
            }),
            Self::I64 => from.as_chunks().0.iter().zip(out.as_chunks_mut().0).for_each(|(from, out)| {
                *out = u32::try_from(i64::from_le_bytes(*from)).unwrap_or(u32::MAX).to_le_bytes();
            }),
        }
    }
}

impl<'a> Stored<'a> {
    /// A tensor of `dtype` that begins at this byte of a shard.
    pub(super) fn new(shard: &'a Shard, start: u64, dtype: Dtype) -> Self {
        Self { shard, start, element: dtype.bitsize() / 8, tiles: 1, columns: None, converts: None, blocks: None }
    }

    /// The same tensor, with columns in `tiles` tiles.
    pub(super) fn tiled(self, tiles: usize) -> Self {
        Self { tiles, ..self }
    }

    /// True if columns that belong together are not neighbours.
    pub(super) fn is_tiled(&self) -> bool {
        self.tiles > 1
    }

    /// The same tensor, stored with elements of `dtype`, read as bf16.
    pub(super) fn rounded(self, dtype: Dtype) -> Self {
        let converts = match dtype {
            Dtype::F16 => Some(Wide::F16),
            Dtype::F32 => Some(Wide::F32),
            _ => None,
        };
        Self { converts, ..self }
    }

    /// The same tensor of I64, read as u32. Numbers that u32 does not have become its largest one.
    pub(super) fn as_u32(self) -> Self {
        Self { converts: Some(Wide::I64), ..self }
    }

    /// Bytes of an element as it is read.
    pub(super) fn element(&self) -> usize {
        match self.blocks {
            Some(_) => size_of::<bf16>(),
            None => self.converts.map_or(self.element, Wide::converted),
        }
    }

    /// The same tensor, blocks of this type in rows of `row` elements, read as bf16.
    pub(super) fn dequantized(self, blocks: BlockType, row: usize) -> Self {
        Self { blocks: Some(BlockRows::new(blocks, row, self.tiles)), ..self }
    }

    /// True if the elements are rounded to bf16.
    pub fn is_rounded(&self) -> bool {
        matches!(self.converts, Some(Wide::F16 | Wide::F32))
    }

    /// The rows `rows` and the columns `columns` of a matrix whose rows have `row` elements; of a tiled one, an equal part
    /// of each tile.
    pub fn part(self, row: usize, rows: Range<usize>, columns: Range<usize>) -> Self {
        if let Some(blocks) = self.blocks {
            let start = self.start + (rows.start * blocks.row_bytes()) as u64;
            return Self { start, blocks: Some(blocks.columns(columns)), ..self };
        }
        let (size, start) = (self.element, self.start + (rows.start * row * self.element) as u64);
        let columns = (columns.len() < row).then(|| Columns {
            row: row * size,
            first: columns.start / self.tiles * size,
            width: columns.len() / self.tiles * size,
        });
        Self { start, columns, ..self }
    }

    /// Reads `out.len()` bytes of the tensor from byte `first` on; if elements are converted, both must be multiples of
    /// the size of a converted one. Any number of threads may read at once.
    ///
    /// The file is not mapped: a read causes no page faults, leaves nothing resident, and if the file was truncated it
    /// returns an error instead of raising a signal.
    pub fn read(&self, first: usize, out: &mut [u8]) -> Result<(), WeightsError> {
        if let Some(blocks) = self.blocks {
            return blocks.read_bf16(first, out, |first, out| self.read_whole(first, out));
        }
        let Some(wide) = self.converts else { return self.read_stored(first, out) };
        let (size, converted) = (wide.size(), wide.converted());
        let mut buffer = vec![0; CONVERT_CHUNK.min(out.len() / converted * size)];
        let mut first = first / converted * size;
        for out in out.chunks_mut(CONVERT_CHUNK / size * converted) {
            let from = &mut buffer[..out.len() / converted * size];
            self.read_stored(first, from)?;
            wide.convert(from, out);
            first += from.len();
        }
        Ok(())
    }

    /// Reads bytes of the chosen columns as they are stored.
    fn read_stored(&self, first: usize, out: &mut [u8]) -> Result<(), WeightsError> {
        let Some(Columns { row, first: start, width }) = self.columns else { return self.read_whole(first, out) };
        let (mut first, mut out) = (first, out);
        while !out.is_empty() {
            let (tile, skipped) = (first / width, first % width);
            let (of_row, rest) = out.split_at_mut((width - skipped).min(out.len()));
            self.read_whole(tile * (row / self.tiles) + start + skipped, of_row)?;
            first += of_row.len();
            out = rest;
        }
        Ok(())
    }

    /// Reads bytes of the whole tensor as stored.
    pub(super) fn read_whole(&self, first: usize, out: &mut [u8]) -> Result<(), WeightsError> {
        read_at(&self.shard.file, out, self.start + first as u64).map_err(|error| io(&self.shard.path, error))?;
        self.shard.bytes_read.fetch_add(out.len() as u64, Ordering::Relaxed);
        Ok(())
    }
}

/// True if two tensors of `bytes` bytes are the same as stored.
pub(super) fn same_bytes(tensors: [Stored<'_>; 2], bytes: usize) -> Result<bool, WeightsError> {
    let (next, differs) = (AtomicUsize::new(0), AtomicBool::new(false));
    let compare = || -> Result<(), WeightsError> {
        let mut buffers = [vec![0; COMPARE_CHUNK.min(bytes)], vec![0; COMPARE_CHUNK.min(bytes)]];
        while !differs.load(Ordering::Relaxed) {
            let first = next.fetch_add(COMPARE_CHUNK, Ordering::Relaxed);
            if first >= bytes {
                break;
            }
            let length = COMPARE_CHUNK.min(bytes - first);
            for (tensor, buffer) in tensors.iter().zip(&mut buffers) {
                tensor.read_stored(first, &mut buffer[..length])?;
            }
            if buffers[0][..length] != buffers[1][..length] {
                differs.store(true, Ordering::Relaxed);
            }
        }
        Ok(())
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = COMPARE_THREADS.min(cores).min(bytes.div_ceil(COMPARE_CHUNK));
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(compare)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
    })?;
    Ok(!differs.into_inner())
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
