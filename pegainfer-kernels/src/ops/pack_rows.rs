//! Rows of several tensors of a GPU in one place, for copies of KV blocks and states outside the device.
//!
//! On the CPU such rows are copied where they are, without an op. The ops are not part of a step, so they are not in its
//! record.

use super::check::Check;
use crate::cuda;
use crate::limits::pack::PART_WORDS;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};

pub use crate::limits::pack::MAX_ROWS;
pub use crate::packed_rows::{PackSegment, PackedRows};

/// Most bytes of a part, which a block of threads copies.
const PART_BYTES: usize = 32 << 10;

/// The segments of the packed rows of `tensors`: a row of each of them, one after the other, in segments of at most `most`
/// bytes, or 32 KiB if that is more. The segments hold addresses: the tensors must live as long.
///
/// # Errors
/// Rows that are no whole number of 32-bit words; no memory.
pub fn pack_segments(exec: &mut Exec, tensors: &[&mut Tensor], most: usize) -> Result<Vec<PackSegment>, OpError> {
    let check = Check("pack_rows");
    let (mut segments, mut parts, mut at) = (Vec::<(usize, Vec<[u64; 4]>)>::new(), 0, 0);
    for tensor in tensors {
        let bytes = tensor.rows_cols().1 * tensor.dtype().size();
        check.that(bytes % 4 == 0, "a row is no whole number of words")?;
        for first in (0..bytes).step_by(PART_BYTES) {
            let part = PART_BYTES.min(bytes - first);
            let listed = [tensor.device() + first as u64, bytes as u64, at as u64, part as u64];
            match segments.last_mut().filter(|(begin, _)| at + part <= begin + most) {
                Some((_, segment)) => segment.push(listed),
                None => segments.push((at, vec![listed])),
            }
            at += part;
            parts += 1;
        }
    }
    let mut table = exec
        .tensor("packed parts", &[parts, PART_WORDS], DType::U32)
        .map_err(|e| OpError { op: "pack_rows", message: e.to_string() })?;
    let all = segments.iter().flat_map(|(_, segment)| segment.as_flattened());
    let halves: Vec<u32> = all.flat_map(|number| [*number as u32, (number >> 32) as u32]).collect();
    exec.fill_rows(&mut table, &halves)?;
    let mut next = 0;
    let segment = |(first, listed): (usize, Vec<[u64; 4]>)| {
        let parts = table.row_range(next..next + listed.len());
        next += listed.len();
        PackSegment { parts, first, bytes: listed.iter().map(|part| part[3] as usize).sum() }
    };
    Ok(segments.into_iter().map(segment).collect())
}

/// `packed[j, i] = row[first + i]` for the bytes of `segment` and each row `j` of `rows`, where `row` is that row of each
/// tensor of [`pack_segments`], one after the other. The sums of a row are `Σ w_i` and `Σ (first / 4 + i + 1) w_i` mod
/// 2^64 over the 32-bit words `w_i` of `packed[j]`: those of all segments add up to the sums of
/// [`Checksum`](pegainfer_core::kv::tiers::Checksum). They are in the host's memory when the stream is done.
///
/// `packed`: u8, at least `count` times the bytes of the segment.
///
/// # Errors
/// Another device than a GPU, a `packed` that is too small, no row or more than [`MAX_ROWS`].
pub fn pack_rows(
    exec: &mut Exec,
    segment: &PackSegment,
    rows: PackedRows<'_>,
    packed: &mut Tensor,
) -> Result<(), OpError> {
    check("pack_rows", segment, rows, packed)?;
    cuda::pack_rows(exec, segment, rows, packed, false)
}

/// The opposite of [`pack_rows`]: `row[first + i] = packed[j, i]`, with the same sums.
pub fn unpack_rows(
    exec: &mut Exec,
    segment: &PackSegment,
    rows: PackedRows<'_>,
    packed: &mut Tensor,
) -> Result<(), OpError> {
    check("unpack_rows", segment, rows, packed)?;
    cuda::pack_rows(exec, segment, rows, packed, true)
}

fn check(op: &'static str, segment: &PackSegment, rows: PackedRows<'_>, packed: &Tensor) -> Result<(), OpError> {
    let check = Check(op);
    check.is(packed, DType::U8, &[packed.elements()])?;
    check.that((1..=MAX_ROWS).contains(&rows.count), "no rows, or too many")?;
    check.that(packed.elements() >= rows.count * segment.bytes, "packed is too small")?;
    check.is(rows.rows, DType::U32, &[rows.rows.elements()])?;
    check.that(rows.count <= rows.rows.elements(), "there are fewer rows")?;
    check.that(rows.sums.1.is_multiple_of(2), "the sums begin between two words of 64 bits")
}
