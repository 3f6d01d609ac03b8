//! Packed layouts, and grids that cover every matrix and fit every card.

use super::*;
use crate::choice::Packing;
use pegainfer_core::weights::grouped::format::{GroupFormat, GroupScales, Offset, ScaleDType, Values};

const Q4_K: GroupFormat = GroupFormat { values: Values::Int { bits: 4 }, scales: GroupScales::K4 };

fn packing(format: GroupFormat, n: usize, k: usize) -> Option<Packing> {
    Packed::of(format, n, k).map(|packed| packed.packing)
}

#[test]
fn formats_are_packed_in_units() {
    let int = |bits, group, offset| GroupFormat::int(bits, group, ScaleDType::Bf16, offset);
    let wide = Packed::of(int(4, 128, Offset::Zero), 64, 256).unwrap();
    assert_eq!((wide.packing, wide.groups, wide.records, wide.extra), (Packing::Int4Wide, 2, 256, 128));
    assert!(Packed::of(int(4, 384, Offset::None), 64, 384).is_some_and(|packed| 2usize >> packed.group_shift == 0));
    assert_eq!(packing(int(4, 128, Offset::None), 64, 384), Some(Packing::Int4Wide));
    // A group that is not a power of two of blocks is held as groups of 32.
    assert_eq!(packing(int(4, 384, Offset::None), 64, 768), Some(Packing::Int4Plain));
    assert_eq!(packing(int(4, 64, Offset::Zero), 64, 768), Some(Packing::Int4Zero));
    assert_eq!(packing(int(4, 128, Offset::Min), 64, 768), Some(Packing::Int4Min));
    assert_eq!(packing(GroupFormat::fp8(768, ScaleDType::F32), 64, 768), Some(Packing::E4m3Wide));
    let nvfp4 = Packed::of(GroupFormat::NVFP4, 64, 768).unwrap();
    assert_eq!((nvfp4.records, nvfp4.extra, nvfp4.extra_at()), (64 * 48, 256, 64 * 48));
    for (format, n, k) in [
        (int(4, 128, Offset::None), 60, 768),
        (Q4_K, 64, 384),
        (int(4, 16, Offset::None), 64, 768),
        (int(5, 32, Offset::Zero), 64, 768),
        (GroupFormat::int(8, 32, ScaleDType::F32, Offset::None), 64, 768),
    ] {
        assert_eq!(packing(format, n, k), None, "{format} [{n}, {k}]");
    }
}

#[test]
fn a_qwen3_32b_layer_fills_an_h200() {
    let of = |n, k, output| {
        let shape = GemmShape { m: 1, n, k, output, format: WeightFormat::Grouped(Q4_K) };
        let p = GroupsPlan::choose(&Gpu::PLANNED, shape).unwrap();
        (p.splits, p.blocks, p.chunk, p.slots)
    };
    assert_eq!(of(10_240, 5120, Output::Bf16), (1, 132, 5120, 2));
    assert_eq!(of(5120, 8192, Output::SplitK), (3, 44, 2816, 2));
    assert_eq!(of(51_200, 5120, Output::Gated), (1, 132, 5120, 3));
    assert_eq!(of(5120, 25_600, Output::SplitK), (3, 44, 8704, 2));
}

#[test]
fn everything_is_covered_and_fits() {
    let shapes = [(2560, 4096), (16, 256), (1024, 3072), (5120, 17_408), (151_936, 2560), (256, 768), (51_200, 5120)];
    let cards = ["H200", "A100", "L4", "RTX 4090", "RTX 5090"].map(|name| Gpu::named(name).unwrap());
    for (gpu, (n, k)) in cards.iter().flat_map(|gpu| shapes.map(|shape| (gpu, shape))) {
        for (m, output) in
            (1..=32).flat_map(|m| [Output::Bf16, Output::F32, Output::SplitK, Output::Gated].map(|output| (m, output)))
        {
            let shape = GemmShape { m, n, k, output, format: WeightFormat::Grouped(Q4_K) };
            let p = GroupsPlan::choose(gpu, shape).unwrap_or_else(|| panic!("{gpu:?} {shape:?}"));
            assert!(p.splits * p.split_columns >= k && (p.splits - 1) * p.split_columns < k, "{p:?}");
            assert!(p.shared <= gpu.shared_memory && p.chunk > 0 && p.chunk.is_multiple_of(UNIT), "{p:?} {shape:?}");
            // A warp has units of at most this many tiles.
            let tiles = (n / TILE).div_ceil(p.blocks);
            assert!(tiles.div_ceil(p.warps) < p.slots, "{p:?} {shape:?}");
            // Only the sums of many tiles do not fit the shared memory of every card.
            let many = m > 5 && n > 50_000 && gpu.shared_memory < 200 << 10;
            assert!(p.blocks * p.splits <= gpu.multiprocessors || many, "{p:?} {shape:?}");
        }
    }
}

#[test]
fn an_output_matrix_has_as_few_blocks_as_fit() {
    let of = |name: &str, m| {
        let format = WeightFormat::Grouped(Q4_K);
        let shape = GemmShape { m, n: 151_936, k: 2560, output: Output::F32, format };
        let gpu = Gpu::named(name).unwrap();
        let p = GroupsPlan::choose(&gpu, shape).unwrap();
        (p.blocks as f64 / gpu.multiprocessors as f64, p.chunk, p.slots)
    };
    assert_eq!(of("L4", 5), (1.0, 256, 12));
    assert_eq!(of("L4", 6), (2.0, 2560, 7));
    assert_eq!(of("L4", 32), (6.0, 256, 5));
    assert_eq!(of("RTX 4090", 9), (2.0, 1280, 5));
    assert_eq!(of("A100", 17), (2.0, 1280, 7));
    assert_eq!(of("H200", 32), (1.0, 768, 10));
}
