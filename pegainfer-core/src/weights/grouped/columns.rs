//! AWQ and GPTQ: 4-bit codes of a weight `[n, k]`, stored transposed.
//!
//! AWQ (`gemm`): word `(r, j)` of `X.qweight`, I32 `[k, n / 8]`, holds column `r` of rows `8j` to `8j + 7`, in the order
//! 0, 2, 4, 6, 1, 3, 5, 7 from the low nibble up. GPTQ: word `(r, c)` of `X.qweight`, I32 `[k / 8, n]`, holds columns
//! `8r` to `8r + 7` of row `c` in order. Both: `X.scales` `[k / group, n]`, and `X.qzeros`, I32 `[k / group, n / 8]`, the
//! zero points of eight rows in a word, in the order of the codes. The weight is `(code - zero) * scale`.
//!
//! `X.g_idx`, I32 `[k]`, is GPTQ's group of each column. If groups are not neighbours, columns are sorted by them.

use super::format::{GroupFormat, Offset, RUN};
use super::pack::pack_nibbles;
use super::weight::{GroupedWeight, Layout, ZeroPoints, check_finite, described, scale_dtype};
use crate::weights::checkpoint::Checkpoint;
use crate::weights::error::WeightsError;
use crate::weights::stored::Stored;
use rayon::prelude::*;
use safetensors::Dtype;
use std::ops::Range;

/// Codes in a word.
const IN_WORD: usize = 8;
/// Nibble of each of the eight rows of an AWQ word.
const AWQ_NIBBLES: [usize; IN_WORD] = [0, 4, 1, 5, 2, 6, 3, 7];
/// Zero point of symmetric codes.
const CENTRE: u8 = 8;
/// Rows that are transposed together: AWQ has 128 of them in a cache line.
const TILE: usize = 128;
/// Bytes that a thread reads at a time.
const READ_CHUNK: usize = 1 << 20;

/// A module with `qweight`.
pub(super) fn open<'a>(
    checkpoint: &'a Checkpoint,
    module: &str,
    zeros: ZeroPoints,
) -> Result<GroupedWeight<'a>, WeightsError> {
    let name = |suffix: &str| format!("{module}.{suffix}");
    let (scale, shape) = described(checkpoint, &name("scales"))?;
    let dtype = scale_dtype(&name("scales"), scale)?;
    let (found, words) = described(checkpoint, &name("qweight"))?;
    let fits = |layout: &str| WeightsError::Quantized {
        name: name("qweight"),
        message: format!("is {found:?} {words:?} with scales {shape:?}, which is no {layout} with 4 bits"),
    };
    let (&[groups, n], &[height, width], Dtype::I32) = (shape, words, found) else {
        return Err(fits("AWQ or GPTQ weight"));
    };
    let (layout, k) = match width {
        _ if width == n => (Layout::Gptq(zeros), IN_WORD * height),
        _ if IN_WORD * width == n => (Layout::Awq(zeros), height),
        _ => return Err(fits("AWQ or GPTQ weight")),
    };
    if groups == 0 || !k.is_multiple_of(groups) || !n.is_multiple_of(IN_WORD) {
        return Err(fits("whole number of groups"));
    }
    checkpoint.stored(&name("qzeros"), Dtype::I32, &[groups, n / IN_WORD])?;
    let group = k / groups;
    let offset = if zeros.symmetric { Offset::None } else { Offset::Zero };
    let format = GroupFormat::int(4, group, dtype, offset);
    let permutation = match layout {
        Layout::Gptq(_) if checkpoint.contains(&name("g_idx")) => permutation(checkpoint, module, (k, group))?,
        _ => None,
    };
    Ok(GroupedWeight { checkpoint, module: module.to_owned(), layout, format, n, k, permutation })
}

/// The columns sorted by groups; `None` if they are sorted already.
fn permutation(
    checkpoint: &Checkpoint,
    module: &str,
    (k, group): (usize, usize),
) -> Result<Option<Vec<u32>>, WeightsError> {
    let name = format!("{module}.g_idx");
    let groups: Vec<u32> = words(&checkpoint.stored(&name, Dtype::I32, &[k])?, k)?;
    if groups.iter().enumerate().all(|(column, g)| *g as usize == column / group) {
        return Ok(None);
    }
    let error = |message: String| Err(WeightsError::Quantized { name: name.clone(), message });
    let mut columns = vec![0; k / group];
    for g in &groups {
        match columns.get_mut(*g as usize) {
            Some(count) => *count += 1,
            None => return error(format!("names group {}, but there are {}", *g as i32, columns.len())),
        }
    }
    if let Some(g) = columns.iter().position(|count| *count != group) {
        return error(format!("puts {} columns into group {g}, expected {group}", columns[g]));
    }
    let mut order: Vec<u32> = (0..k as u32).collect();
    order.sort_by_key(|column| groups[*column as usize]);
    Ok(Some(order))
}

/// Reads some rows and columns; see [`GroupedWeight::read`].
pub(super) fn read(
    weight: &GroupedWeight<'_>,
    zeros: ZeroPoints,
    rows: Range<usize>,
    columns: Range<usize>,
    (codes, scales): (&mut [u8], &mut [u8]),
) -> Result<(), WeightsError> {
    let group = weight.format.group();
    let groups = match group == weight.k {
        true => 0..1,
        false => columns.start / group..columns.end / group,
    };
    read_scales(weight, zeros, &rows, groups, scales)?;
    let awq = matches!(weight.layout, Layout::Awq(_));
    // A permutation takes columns from everywhere.
    let held = if weight.permutation.is_some() { 0..weight.k } else { columns.clone() };
    let stored = |shape: [usize; 2]| weight.checkpoint.stored(&weight.name("qweight"), Dtype::I32, &shape);
    if awq {
        let width = rows.end.div_ceil(IN_WORD) - rows.start / IN_WORD;
        let part = rows.start / IN_WORD..rows.end.div_ceil(IN_WORD);
        let stored = stored([weight.k, weight.n / IN_WORD])?.part(weight.n / IN_WORD, held, part);
        let words = words(&stored, columns.len() * width)?;
        let skipped = rows.start % IN_WORD;
        pack_tiles(codes, columns.len(), |first, run, tile| {
            for column in 0..RUN {
                let line = &words[(run * RUN + column) * width..][..width];
                for (row, codes) in tile.iter_mut().enumerate() {
                    let at = skipped + first + row;
                    codes[column] = (line[at / IN_WORD] >> (4 * AWQ_NIBBLES[at % IN_WORD])) as u8 & 15;
                }
            }
        });
    } else {
        let (width, height) = (rows.len(), held.len() / IN_WORD);
        let part = held.start / IN_WORD..held.end / IN_WORD;
        let stored = stored([weight.k / IN_WORD, weight.n])?.part(weight.n, part, rows);
        let words = words(&stored, height * width)?;
        let order = weight.permutation.as_deref();
        pack_tiles(codes, columns.len(), |first, run, tile| {
            for column in 0..RUN {
                let place = run * RUN + column;
                let from = order.map_or(place, |order| order[columns.start + place] as usize);
                let line = &words[from / IN_WORD * width + first..];
                for (codes, word) in tile.iter_mut().zip(line) {
                    codes[column] = (word >> (4 * (from % IN_WORD))) as u8 & 15;
                }
            }
        });
    }
    Ok(())
}

/// Packs rows of `k` codes of 4 bits. `fill(first row, run, rows of codes)` gives the codes of 32 columns of up to
/// [`TILE`] rows.
fn pack_tiles(codes: &mut [u8], k: usize, fill: impl Fn(usize, usize, &mut [[u8; RUN]]) + Sync) {
    let row_bytes = k / 2;
    codes.par_chunks_mut(TILE * row_bytes).enumerate().for_each(|(i, codes)| {
        let mut tile = [[0; RUN]; TILE];
        let tile = &mut tile[..codes.len() / row_bytes];
        for run in 0..k / RUN {
            fill(i * TILE, run, tile);
            for (row, codes) in tile.iter().zip(codes.chunks_exact_mut(row_bytes)) {
                pack_nibbles(row, &mut codes[run * RUN / 2..][..RUN / 2]);
            }
        }
    });
}

/// Reads the scales and zero points of some rows and groups.
fn read_scales(
    weight: &GroupedWeight<'_>,
    zeros: ZeroPoints,
    rows: &Range<usize>,
    groups: Range<usize>,
    out: &mut [u8],
) -> Result<(), WeightsError> {
    let (name, count) = (weight.name("scales"), groups.len());
    let (stored, shape) = described(weight.checkpoint, &name)?;
    let dtype = scale_dtype(&name, stored)?;
    let (size, all) = (dtype.size(), shape[0]);
    let part = weight.checkpoint.stored(&name, stored, &[all, weight.n])?.part(weight.n, groups.clone(), rows.clone());
    let mut scales = vec![0; count * rows.len() * size];
    part.read(0, &mut scales)?;
    check_finite(&name, dtype, &scales)?;
    let points = zero_points(weight, zeros, rows, (all, groups))?;
    let row_bytes = out.len() / rows.len();
    for (row, out) in out.chunks_exact_mut(row_bytes).enumerate() {
        let (numbers, zeros) = out.split_at_mut(count * size);
        for (group, number) in numbers.chunks_exact_mut(size).enumerate() {
            number.copy_from_slice(&scales[(group * rows.len() + row) * size..][..size]);
        }
        zeros.iter_mut().enumerate().for_each(|(group, zero)| *zero = points[group * rows.len() + row]);
    }
    Ok(())
}

/// Zero points, `[groups, rows]`.
fn zero_points(
    weight: &GroupedWeight<'_>,
    zeros: ZeroPoints,
    rows: &Range<usize>,
    (all, groups): (usize, Range<usize>),
) -> Result<Vec<u8>, WeightsError> {
    let (name, count) = (weight.name("qzeros"), groups.len());
    let part = rows.start / IN_WORD..rows.end.div_ceil(IN_WORD);
    let (width, skipped) = (part.len(), rows.start % IN_WORD);
    let stored = weight.checkpoint.stored(&name, Dtype::I32, &[all, weight.n / IN_WORD])?;
    let words = words(&stored.part(weight.n / IN_WORD, groups, part), count * width)?;
    let awq = matches!(weight.layout, Layout::Awq(_));
    let point = |i: usize| {
        let at = skipped + i % rows.len();
        let nibble = if awq { AWQ_NIBBLES[at % IN_WORD] } else { at % IN_WORD };
        let stored = (words[i / rows.len() * width + at / IN_WORD] >> (4 * nibble)) as u8 & 15;
        stored + u8::from(!awq && zeros.less_one)
    };
    let points: Vec<u8> = (0..count * rows.len()).map(point).collect();
    match points.iter().find(|point| zeros.symmetric && **point != CENTRE) {
        Some(point) => Err(weight.error(
            "qzeros",
            format!("has a zero point of {point}, but quantization_config says that weights are symmetric (8)"),
        )),
        None => Ok(points),
    }
}

/// Reads `count` words, on rayon's threads.
fn words(stored: &Stored<'_>, count: usize) -> Result<Vec<u32>, WeightsError> {
    let mut words = vec![0u32; count];
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
    let chunks = bytes.par_chunks_mut(READ_CHUNK).enumerate();
    chunks.try_for_each(|(i, chunk)| stored.read(i * READ_CHUNK, chunk))?;
    Ok(words)
}
