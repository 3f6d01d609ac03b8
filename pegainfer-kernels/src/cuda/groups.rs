//! Group-quantised weights: launches of csrc/gemm/pack_groups.cu, which packs and widens them, and of the GEMMs of few rows
//! of x, csrc/gemm/skinny_groups.cu.

use super::abi::{
    Entry, ExpandScales, PackCodes, PackScales, SkinnyGroups, Target, TransposeScales, WidenInt4, WidenPacked,
};
use crate::choice::{GroupsPlan, Output, Packed, Packing, group_width};
use crate::limits::{int4, pack_groups::THREADS};
use pegainfer_core::cuda::Cuda;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};
use pegainfer_core::weights::grouped::format::{GroupFormat, Values};

/// Columns of a unit, of a quad's part of a unit, and of a lane's part of a block.
const UNIT: usize = 256;
const QUAD: usize = 64;
const LANE: usize = 32;

/// A group-quantised weight in the order of the kernels.
#[derive(Clone, Copy)]
pub(super) struct PackedWeight<'a> {
    pub format: GroupFormat,
    pub layout: Packed,
    /// `[n, code_bytes(k)]` u8.
    pub codes: &'a Tensor,
    /// u8, as csrc/common/groups.cuh describes.
    pub scales: &'a Tensor,
}

impl<'a> PackedWeight<'a> {
    /// The weight `[n, k]`; `None` for a format or a shape that is not packed.
    pub fn of(format: GroupFormat, (n, k): (usize, usize), codes: &'a Tensor, scales: &'a Tensor) -> Option<Self> {
        Packed::of(format, n, k).map(|layout| Self { format, layout, codes, scales })
    }
}

/// Packs the codes of FP8 `[n, k]` in place, and writes the scales of its blocks of 128 x 128 for each row to `to`.
pub(crate) fn pack_fp8(exec: &mut Exec, codes: &mut Tensor, from: &Tensor, to: &mut Tensor) -> Result<(), OpError> {
    let (op, (n, k), blocks, gpu) = ("pack_fp8", codes.rows_cols(), from.rows_cols().1, exec.gpu()?);
    let launch = PackCodes::pack_codes.launch(gpu, op, PackCodes { codes, n, k, bits: 8, is_integer: 0 })?;
    // SAFETY: a lane's codes of a block a thread, all covered by the grid.
    unsafe { launch.run([(n * k / LANE).div_ceil(THREADS), 1, 1], THREADS)? };
    let launch = ExpandScales::expand_scales.launch(gpu, op, ExpandScales { from, to, n, blocks })?;
    // SAFETY: a number a thread, all covered by the grid; `to` has n for each block.
    unsafe { launch.run([(n * blocks).div_ceil(THREADS), 1, 1], THREADS) }
}

/// Packs codes `[n, code_bytes(k)]` in place, and the scales of `from` into `to`, as csrc/common/groups.cuh describes.
pub(crate) fn pack(
    exec: &mut Exec,
    (format, packed): (GroupFormat, Packed),
    codes: &mut Tensor,
    from: &Tensor,
    to: &mut Tensor,
) -> Result<(), OpError> {
    let (op, (n, bytes), gpu) = ("pack_groups", codes.rows_cols(), exec.gpu()?);
    let (bits, pitch) = (format.bits(), from.rows_cols().1);
    let k = bytes * 8 / bits;
    let is_integer = usize::from(matches!(format.values, Values::Int { .. }));
    let launch = PackCodes::pack_codes.launch(gpu, op, PackCodes { codes, n, k, bits, is_integer })?;
    // SAFETY: a lane's codes of a block a thread, all covered by the grid.
    unsafe { launch.run([(n * k / LANE).div_ceil(THREADS), 1, 1], THREADS)? };
    if !packed.is_wide() {
        let arguments = PackScales {
            from,
            to,
            extra: packed.records as u64,
            kind: kind(packed),
            n,
            k,
            pitch,
            group: format.group(),
        };
        let launch = PackScales::pack_scales.launch(gpu, op, arguments)?;
        // SAFETY: a unit of a row a thread, all covered by the grid; `to` has the bytes of `packed`.
        return unsafe { launch.run([(n * k / UNIT).div_ceil(THREADS), 1, 1], THREADS) };
    }
    let (groups, size) = (packed.groups, packed.dtype.size());
    let mut transpose = |to_first: u64, first: usize, bytes: usize| {
        let arguments = TransposeScales { from, to: &mut *to, to_first, n, groups, pitch, first, bytes };
        let launch = TransposeScales::transpose_scales.launch(gpu, op, arguments)?;
        // SAFETY: one number a thread, all covered by the grid.
        unsafe { launch.run([(n * groups).div_ceil(THREADS), 1, 1], THREADS) }
    };
    transpose(0, 0, size)?;
    if packed.extra > 0 { transpose(packed.extra_at(), size * groups, 1) } else { Ok(()) }
}

/// Number of the layout of scales in csrc/common/groups.cuh.
fn kind(packed: Packed) -> usize {
    match packed.packing {
        Packing::Int4Wide | Packing::E4m3Wide => 0,
        Packing::Int4Plain | Packing::Int5Plain | Packing::Int8Plain | Packing::Iq4Plain => 1,
        Packing::Int4Zero => 2,
        Packing::Int4Min | Packing::Int5Min => 3,
        Packing::Int4K | Packing::Int5K => 4,
        Packing::Int6K => 5,
        Packing::Iq4Xs => 6,
        Packing::E2m1E4m3 => 7,
        Packing::E2m1E8m0 => 8,
    }
}

/// Kernels for up to 8, 16 and 32 rows of x.
fn skinny(packed: Packed) -> [Entry<SkinnyGroups<'static>>; 3] {
    type K = SkinnyGroups<'static>;
    match packed.packing {
        Packing::Int4Wide => [K::skinny_int4_wide_8, K::skinny_int4_wide_16, K::skinny_int4_wide_32],
        Packing::Int4Plain => [K::skinny_int4_plain_8, K::skinny_int4_plain_16, K::skinny_int4_plain_32],
        Packing::Int4Zero => [K::skinny_int4_zero_8, K::skinny_int4_zero_16, K::skinny_int4_zero_32],
        Packing::Int4Min => [K::skinny_int4_min_8, K::skinny_int4_min_16, K::skinny_int4_min_32],
        Packing::Int4K => [K::skinny_int4_k_8, K::skinny_int4_k_16, K::skinny_int4_k_32],
        Packing::Int5Plain => [K::skinny_int5_plain_8, K::skinny_int5_plain_16, K::skinny_int5_plain_32],
        Packing::Int5Min => [K::skinny_int5_min_8, K::skinny_int5_min_16, K::skinny_int5_min_32],
        Packing::Int5K => [K::skinny_int5_k_8, K::skinny_int5_k_16, K::skinny_int5_k_32],
        Packing::Int6K => [K::skinny_int6_k_8, K::skinny_int6_k_16, K::skinny_int6_k_32],
        Packing::Int8Plain => [K::skinny_int8_plain_8, K::skinny_int8_plain_16, K::skinny_int8_plain_32],
        Packing::Iq4Plain => [K::skinny_iq4_plain_8, K::skinny_iq4_plain_16, K::skinny_iq4_plain_32],
        Packing::Iq4Xs => [K::skinny_iq4_xs_8, K::skinny_iq4_xs_16, K::skinny_iq4_xs_32],
        Packing::E2m1E4m3 => [K::skinny_e2m1_e4m3_8, K::skinny_e2m1_e4m3_16, K::skinny_e2m1_e4m3_32],
        Packing::E2m1E8m0 => [K::skinny_e2m1_e8m0_8, K::skinny_e2m1_e8m0_16, K::skinny_e2m1_e8m0_32],
        Packing::E4m3Wide => [K::skinny_e4m3_wide_8, K::skinny_e4m3_wide_16, K::skinny_e4m3_wide_32],
    }
}

/// Launches the GEMM of `x` and `w`; writes to `out`.
pub(super) fn skinny_groups(
    gpu: &mut Cuda,
    op: &'static str,
    x: &Tensor,
    PackedWeight { layout, codes, scales, .. }: PackedWeight<'_>,
    (plan, output): (&GroupsPlan, Output),
    out: Target<'_>,
) -> Result<(), OpError> {
    let ((m, k), n) = (x.rows_cols(), codes.rows_cols().0);
    let pitch = out.pitch(if output == Output::Gated { n / 2 } else { n });
    let arguments = SkinnyGroups {
        x,
        codes,
        scales,
        out,
        extra: layout.extra_at(),
        dtype: layout.dtype_number(),
        group_shift: layout.group_shift,
        m,
        n,
        k,
        pitch,
        slice: plan.split_columns,
        chunk: plan.chunk,
        slots: plan.slots,
        output: match output {
            Output::Bf16 => 0,
            Output::F32 | Output::SplitK => 1,
            Output::Gated => 2,
        },
    };
    let launch = skinny(layout)[group_width(m)].launch(gpu, op, arguments)?.early(codes).early(scales).overlapped();
    // SAFETY: the op checked the shapes, and the plan covers all rows and columns.
    unsafe { launch.shared(plan.shared).run([plan.blocks, plan.splits, 1], 32 * plan.warps) }
}

/// Launches the kernel that widens `rows` rows of a weight of `k` columns, from `first` on, to address `out`.
pub(super) fn widen(
    gpu: &mut Cuda,
    op: &'static str,
    (PackedWeight { layout, codes, scales, .. }, k): (PackedWeight<'_>, usize),
    (first, rows): (usize, usize),
    out: u64,
) -> Result<(), OpError> {
    let (n, extra, group_shift) = (codes.rows_cols().0, layout.extra_at(), layout.group_shift);
    let kernel = match layout.packing {
        Packing::Int4Wide => {
            let f16 = usize::from(layout.dtype_number() == 0);
            let arguments = WidenInt4 { codes, scales, out, zeros: extra, group_shift, f16, n, k, first, rows };
            let launch = WidenInt4::widen_int4.launch(gpu, op, arguments)?;
            // SAFETY: 32 columns a thread, all covered by the grid; the caller has memory for them.
            return unsafe { launch.run([(rows * k / LANE).div_ceil(int4::THREADS), 1, 1], int4::THREADS) };
        }
        Packing::Int4Plain => WidenPacked::widen_int4_plain,
        Packing::Int4Zero => WidenPacked::widen_int4_zero,
        Packing::Int4Min => WidenPacked::widen_int4_min,
        Packing::Int4K => WidenPacked::widen_int4_k,
        Packing::Int5Plain => WidenPacked::widen_int5_plain,
        Packing::Int5Min => WidenPacked::widen_int5_min,
        Packing::Int5K => WidenPacked::widen_int5_k,
        Packing::Int6K => WidenPacked::widen_int6_k,
        Packing::Int8Plain => WidenPacked::widen_int8_plain,
        Packing::Iq4Plain => WidenPacked::widen_iq4_plain,
        Packing::Iq4Xs => WidenPacked::widen_iq4_xs,
        Packing::E2m1E4m3 => WidenPacked::widen_e2m1_e4m3,
        Packing::E2m1E8m0 => WidenPacked::widen_e2m1_e8m0,
        Packing::E4m3Wide => WidenPacked::widen_e4m3_wide,
    };
    let dtype = layout.dtype_number();
    let arguments = WidenPacked { codes, scales, out, extra, dtype, group_shift, n, k, first, rows };
    let launch = kernel.launch(gpu, op, arguments)?;
    // SAFETY: a quad's part of a unit a thread, all covered by the grid; the caller has memory for them.
    unsafe { launch.run([(rows * k / QUAD).div_ceil(THREADS), 1, 1], THREADS) }
}
