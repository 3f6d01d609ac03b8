//! Grids cover every matrix and fit the card.

use super::super::{CublasLt, Gemm};
use super::*;
use pegainfer_core::exec::Activations;
use pegainfer_core::weights::grouped::format::{GroupFormat, Offset, ScaleDType};

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
fn prompts_are_rounded_to_fp8_on_hopper_only() {
    let choose = |card: &str, activations, output, m| {
        let gpu = Gpu { activations, ..Gpu::named(card).unwrap() };
        Gemm::choose(&gpu, shape(m, 10_240, 5120, output)).name()
    };
    let rounded = |output, m| choose("H200", Activations::RoundedPrompts, output, m);
    assert_eq!([128, 129, 4096].map(|m| rounded(Output::Bf16, m)), ["skinny_int4", "widened_fp8", "widened_fp8"]);
    assert_eq!([64, 65].map(|m| rounded(Output::Gated, m)), ["skinny_int4", "widened_fp8"]);
    for exact in [Activations::Exact, Activations::Rounded] {
        assert_eq!(choose("H200", exact, Output::Bf16, 4096), "widened");
    }
    assert_eq!(choose("A100", Activations::RoundedPrompts, Output::Bf16, 4096), "widened");
    let gpu = Gpu { activations: Activations::RoundedPrompts, cublaslt: CublasLt::Bf16, ..Gpu::PLANNED };
    assert_eq!(Gemm::choose(&gpu, shape(4096, 10_240, 5120, Output::Bf16)).name(), "widened");
    let format = WeightFormat::Grouped(GroupFormat::NVFP4);
    let gpu = Gpu { cublaslt: CublasLt::BlockScales, ..gpu };
    let nvfp4 = GemmShape { format, ..shape(4096, 10_240, 5120, Output::Bf16) };
    assert_eq!(Gemm::choose(&gpu, nvfp4).name(), "widened");
}

#[test]
fn everything_is_covered_and_fits() {
    let shapes = [(2560, 4096), (16, 128), (1024, 3072), (5120, 17_408), (151_936, 2560), (256, 768), (51_200, 5120)];
    let gpu = &Gpu::named("H200").unwrap();
    for (n, k) in shapes {
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
            };
            assert!(splits * columns >= k && (splits - 1) * columns < k, "{chosen:?}");
            assert!(shared <= gpu.shared_memory && rows >= all, "{chosen:?} {n} {k} {m}");
        }
    }
}
