//! The ragged batch of a step, and the rings that carry recent tokens from one step to the next.

use super::values::cpu;
pub use crate::cpu::deepseek_v4::batch::PAGE_TOKENS;
use crate::cpu::deepseek_v4::batch::{self as reference, Rows};
use crate::cuda::deepseek_v4 as gpu;
use crate::limits::deepseek_v4_attention;
use crate::ops::check::Check;
use half::bf16;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Marks an empty place in a list of chosen entries.
pub const NO_ENTRY: u32 = deepseek_v4_attention::NO_ENTRY;

/// The tokens of a step and the state of its sequences. `T` tokens, `B` rows, all u32.
///
/// A row's positions are consecutive. State of positions before a row's first token is in its slot of a ring. The ops
/// read rings before they write them, so a chunk of any length may replace them.
///
/// A row with the slot [`NO_SLOT`](pegainfer_core::kv::NO_SLOT) pads the step to the shape of a CUDA graph: it has no
/// state, and its positions and pages may hold anything. For it, attention writes zeros, the choice of entries writes
/// [`NO_ENTRY`], and no other op writes anything. Tokens after the last row count as those of such a row.
#[derive(Debug, Clone, Copy)]
pub struct RaggedBatch<'a> {
    /// Row `b` owns tokens `qo_indptr[b]..qo_indptr[b + 1]`, at least one, `[B + 1]`.
    pub qo_indptr: &'a Tensor,
    /// Absolute position of each token, `[T]`.
    pub positions: &'a Tensor,
    /// The state slot of each row, `[B]`, different ones.
    pub slots: &'a Tensor,
    /// Pages of compressed entries of each row, `[B, pages]`; page `j` has those of tokens `128 j` to `128 j + 127`.
    pub page_tables: &'a Tensor,
}

impl RaggedBatch<'_> {
    pub(super) fn check(&self, check: Check, tokens: usize) -> Result<(), OpError> {
        let (rows, pages) = self.page_tables.rows_cols();
        check.is(self.qo_indptr, DType::U32, &[rows + 1])?;
        check.is(self.positions, DType::U32, &[tokens])?;
        check.is(self.slots, DType::U32, &[rows])?;
        check.is(self.page_tables, DType::U32, &[rows, pages])
    }

    /// Inputs of an op, for its record.
    pub(super) fn operands(&self) -> [&Tensor; 4] {
        [self.qo_indptr, self.positions, self.slots, self.page_tables]
    }

    pub(super) fn rows(&self) -> Rows<'_> {
        Rows {
            indptr: self.qo_indptr.host(),
            positions: self.positions.host(),
            slots: self.slots.host(),
            tables: self.page_tables.host(),
            pages: self.page_tables.rows_cols().1,
        }
    }
}

/// Puts the newest tokens of each row into its ring, that of position `p` at row `p % ring` of its slot.
///
/// `fresh`: `[T, width]` bf16 or f32; `rings`: `[slots, ring, width]` of the same dtype. Values are copied.
pub fn write_ring(exec: &mut Exec, fresh: &Tensor, batch: &RaggedBatch<'_>, rings: &mut Tensor) -> Result<(), OpError> {
    let check = Check("write_ring");
    let (tokens, width) = fresh.rows_cols();
    let &[slots, ring, _] = rings.shape() else { return check.that(false, "rings must be [slots, ring, width]") };
    batch.check(check, tokens)?;
    check.is(rings, fresh.dtype(), &[slots, ring, width])?;
    exec.record(|_| {
        let reads: Vec<&Tensor> = [fresh].into_iter().chain(batch.operands()).collect();
        // Tokens that newer ones of the step overwrite are not moved.
        let bytes = fresh.bytes().min((batch.slots.elements() * ring * width * fresh.dtype().size()) as u64);
        OpRecord::new("write_ring", "rows", &reads, &[rings], 0).with_bytes(2 * bytes)
    });
    if exec.device() == Device::Cuda {
        return gpu::write_ring(exec, "write_ring", fresh, batch, rings);
    }
    if cpu(check, exec)?.is_some() {
        ring_host(fresh, batch, rings);
    }
    Ok(())
}

/// Puts the newest tokens of each row into its ring, that of position `p` at row `p % ring` of its slot, on the host.
/// `fresh`: `[T, width]` bf16 or f32; `rings`: `[slots, ring, width]` of the same dtype.
pub(super) fn ring_host(fresh: &Tensor, batch: &RaggedBatch<'_>, rings: &mut Tensor) {
    let (ring, width) = (rings.shape()[1], rings.shape()[2]);
    match fresh.dtype() {
        DType::F32 => reference::write_ring::<f32>(batch.rows(), fresh.host(), rings.host_mut(), ring, width),
        _ => reference::write_ring::<bf16>(batch.rows(), fresh.host(), rings.host_mut(), ring, width),
    }
}
