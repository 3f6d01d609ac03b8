//! Packed layouts and grids cover every matrix and fit every card.

use super::*;

const INT4: GroupFormat = GroupFormat::int(4, 128, ScaleDType::F16, Offset::Zero);

fn shape(m: usize, n: usize, k: usize, output: Output) -> GemmShape {
    GemmShape { m, n, k, output, format: WeightFormat::Grouped(INT4) }
}

#[test]
fn a_qwen3_32b_layer_fills_an_h200() {
    let of = |n, k, output| match Int4Gemm::choose(&Gpu::PLANNED, shape(1, n, k, output)) {
        Some(Int4Gemm::Mma(p)) => (p.splits, p.blocks, p.passes, p.strips, p.parts),
        other => panic!("{other:?}"),
    };
    assert_eq!(of(10_240, 5120, Output::Bf16), (1, 132, 1, 5, 3));
    assert_eq!(of(5120, 8192, Output::SplitK), (3, 44, 1, 8, 1));
    assert_eq!(of(51_200, 5120, Output::Gated), (1, 132, 2, 13, 1));
    assert_eq!(of(5120, 25_600, Output::SplitK), (3, 44, 1, 8, 1));
}

#[test]
fn formats_without_a_kernel_are_not_packed() {
    assert_eq!(Packed::of(INT4, 64, 256), Some(Packed { group_shift: 0, groups: 2, f16: true, zeros: true }));
    let int4 = |group, offset| GroupFormat::int(4, group, ScaleDType::Bf16, offset);
    assert!(Packed::of(int4(384, Offset::None), 64, 384).is_some_and(|packed| 2usize >> packed.group_shift == 0));
    assert_eq!(Packed::of(int4(384, Offset::None), 64, 768), None);
    assert_eq!(Packed::of(int4(64, Offset::None), 64, 768), None);
    assert_eq!(Packed::of(int4(128, Offset::Min), 64, 768), None);
    assert_eq!(Packed::of(int4(128, Offset::None), 60, 768), None);
    assert_eq!(Packed::of(GroupFormat::NVFP4, 64, 768), None);
}

#[test]
fn everything_is_covered_and_fits() {
    let shapes = [(2560, 4096), (16, 128), (1024, 3072), (5120, 17_408), (151_936, 2560), (256, 768), (51_200, 5120)];
    let cards = ["H200", "A100", "L4", "RTX 4090", "RTX 5090"].map(|name| Gpu::named(name).unwrap());
    for (gpu, (n, k)) in cards.iter().flat_map(|gpu| shapes.map(|shape| (gpu, shape))) {
        for (m, output) in
            (1..=128).flat_map(|m| [Output::Bf16, Output::F32, Output::SplitK, Output::Gated].map(|output| (m, output)))
        {
            let all = if output == Output::Gated { n / 2 } else { n };
            let Some(chosen) = Int4Gemm::choose(gpu, shape(m, n, k, output)) else { continue };
            let (splits, columns, shared, rows) = match chosen {
                Int4Gemm::Mma(p) => {
                    assert!(p.strips * p.parts <= skinny_int4::MMA_WARPS && p.slots >= p.parts, "{p:?}");
                    assert!(p.strips * if output == Output::Gated { 8 } else { 16 } >= p.rows, "{p:?}");
                    (p.splits, p.split_columns, p.shared, p.blocks * p.passes * p.rows)
                }
                Int4Gemm::Wgmma(p) => {
                    assert!(p.slots >= 2 * p.warpgroups && p.rows <= 64, "{p:?}");
                    (p.splits, p.split_columns, p.shared, p.blocks * p.passes * p.warpgroups * p.rows)
                }
                Int4Gemm::Gemv(p) => {
                    assert!(p.warps.is_multiple_of(p.parts) && p.warps <= gemv_int4::MAX_WARPS, "{p:?}");
                    (p.splits, p.split_columns, p.shared, all)
                }
            };
            assert!(splits * columns >= k && (splits - 1) * columns < k, "{chosen:?}");
            assert!(shared <= gpu.shared_memory && rows >= all, "{chosen:?} {n} {k} {m}");
        }
    }
}
