//! Rows of several tensors of a GPU in one place, for copies of KV blocks and states outside the device.
//!
//! On the CPU such rows are copied where they are, without an op. The ops are not part of a step, so they are not in its
//! record.

use super::check::Check;
use crate::cuda;
use crate::limits::pack::PART_WORDS;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Most bytes of a part, which a block of threads copies.
const PART_BYTES: usize = 32 << 10;

/// Consecutive bytes of packed rows, at most as many as were asked for.
#[derive(Debug)]
pub struct PackPiece {
    /// `[parts, 8]`: address of the part in row 0, bytes from row to row, first byte within the packed rows, bytes.
    parts: Tensor,
    /// First byte within the packed rows.
    pub first: usize,
    /// Number of bytes.
    pub bytes: usize,
    /// Smallest number of rows of the tensors.
    rows: usize,
}

/// The pieces of the packed rows of `tensors`: a row of each of them, one after the other, in pieces of at most `most`
/// bytes, or 32 KiB if that is more. The pieces hold addresses: the tensors must live as long.
///
/// # Errors
/// Rows that are no whole number of 32-bit words; no memory.
pub fn pack_pieces(exec: &mut Exec, tensors: &[&mut Tensor], most: usize) -> Result<Vec<PackPiece>, OpError> {
    let check = Check("pack_rows");
    let (mut pieces, mut parts, mut at) = (Vec::<(usize, Vec<[u64; 4]>)>::new(), 0, 0);
    for tensor in tensors {
        let bytes = tensor.rows_cols().1 * tensor.dtype().size();
        check.that(bytes % 4 == 0, "a row is no whole number of words")?;
        for first in (0..bytes).step_by(PART_BYTES) {
            let part = PART_BYTES.min(bytes - first);
            let listed = [tensor.device() + first as u64, bytes as u64, at as u64, part as u64];
            match pieces.last_mut().filter(|(begin, _)| at + part <= begin + most) {
                Some((_, piece)) => piece.push(listed),
                None => pieces.push((at, vec![listed])),
            }
            at += part;
            parts += 1;
        }
    }
    let mut table = exec
        .tensor("packed parts", &[parts, PART_WORDS], DType::U32)
        .map_err(|e| OpError { op: "pack_rows", message: e.to_string() })?;
    let all = pieces.iter().flat_map(|(_, piece)| piece.as_flattened());
    let halves: Vec<u32> = all.flat_map(|number| [*number as u32, (number >> 32) as u32]).collect();
    exec.fill_rows(&mut table, &halves)?;
    let rows = tensors.iter().map(|tensor| tensor.rows_cols().0).min().unwrap_or(0);
    let mut next = 0;
    let piece = |(first, listed): (usize, Vec<[u64; 4]>)| {
        let parts = table.row_range(next..next + listed.len());
        next += listed.len();
        PackPiece { parts, first, bytes: listed.iter().map(|part| part[3] as usize).sum(), rows }
    };
    Ok(pieces.into_iter().map(piece).collect())
}

/// `packed[i] = rows[first + i]` for the bytes of `piece`, where `rows` is row `row` of each tensor of
/// [`pack_pieces`], one after the other; `sums = Σ w_i, Σ (first / 4 + i + 1) w_i` mod 2^64 over the 32-bit words `w_i` of
/// `packed`. The sums of all pieces add up to those of [`Checksum`](pegainfer_core::kv::tiers::Checksum).
///
/// `packed`: `[n]` u8, at least the bytes of the piece; `sums`: `[4]` u32, two 64-bit numbers.
///
/// # Errors
/// Another device than a GPU, other shapes, or no such row.
pub fn pack_rows(
    exec: &mut Exec,
    piece: &PackPiece,
    row: usize,
    packed: &mut Tensor,
    sums: &mut Tensor,
) -> Result<(), OpError> {
    check("pack_rows", piece, row, packed, sums)?;
    cuda::pack_rows(exec, &piece.parts, row, packed, sums, false)
}

/// The opposite of [`pack_rows`]: `rows[first + i] = packed[i]`, with the same sums.
pub fn unpack_rows(
    exec: &mut Exec,
    piece: &PackPiece,
    row: usize,
    packed: &mut Tensor,
    sums: &mut Tensor,
) -> Result<(), OpError> {
    check("unpack_rows", piece, row, packed, sums)?;
    cuda::pack_rows(exec, &piece.parts, row, packed, sums, true)
}

fn check(op: &'static str, piece: &PackPiece, row: usize, packed: &Tensor, sums: &Tensor) -> Result<(), OpError> {
    let check = Check(op);
    check.is(packed, DType::U8, &[packed.elements()])?;
    check.is(sums, DType::U32, &[4])?;
    check.that(packed.elements() >= piece.bytes, "packed has fewer bytes than the piece")?;
    check.that(row < piece.rows, "the tensors have no such row")
}
