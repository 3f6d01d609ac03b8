//! The choices of every card for the shapes of Qwen3-4B and Qwen3.5-4B, against the table in table.txt.

use super::*;
use crate::delta::DeltaShape;
use crate::heads::{HeadShape, KvDType};
use crate::load::AttentionLoad;
use crate::ops;
use pegainfer_core::tensor::DType;

const CARDS: [&str; 7] = ["H200", "H100", "A100", "L4", "RTX 4090", "B200", "RTX 5090"];
/// Rows, or tokens, at which grids are compared; kernels are compared at each number up to the last one.
const ROWS: [usize; 13] = [1, 2, 8, 16, 17, 32, 64, 96, 97, 128, 512, 1024, 4096];
const QWEN3: HeadShape = HeadShape { heads: 32, kv_heads: 8, head_dim: 128 };
const QWEN35: HeadShape = HeadShape { heads: 16, kv_heads: 4, head_dim: 256 };
const DELTA: DeltaShape =
    DeltaShape { key_heads: 16, value_heads: 32, key_dim: 128, value_dim: 128, conv_width: 4, tiled_output: false };
/// Context of decoding rows, in tokens.
const CONTEXT: usize = 1100;

/// A line of the table: the row counts from which another kernel runs, and those of [`ROWS`] at which the grid changed. A
/// kernel's name stands where it begins.
fn line(card: &str, what: &str, choice: impl Fn(usize) -> (&'static str, String)) -> String {
    let (mut text, mut last) = (format!("{card:<8} {what:<9}"), ("", String::new()));
    for rows in 1..=ROWS[ROWS.len() - 1] {
        let (name, grid) = choice(rows);
        if name != last.0 || (ROWS.contains(&rows) && grid != last.1) {
            let shown = if name == last.0 { "" } else { name };
            let words: Vec<&str> = [shown, &grid].into_iter().filter(|word| !word.is_empty()).collect();
            let bar = if last.0.is_empty() { "" } else { " |" };
            text += &format!("{bar}{rows:>4} {}", words.join(" "));
            last = (name, grid);
        }
    }
    text + "\n"
}

/// A line without grids.
fn names(card: &str, what: &str, choice: impl Fn(usize) -> &'static str) -> String {
    line(card, what, |rows| (choice(rows), String::new()))
}

fn bf16(gpu: &Gpu, card: &str) -> String {
    gemms(gpu, card, WeightFormat::Bf16)
}

fn fp8(gpu: &Gpu, card: &str) -> String {
    gemms(gpu, card, WeightFormat::Fp8)
}

fn gemms(gpu: &Gpu, card: &str, format: WeightFormat) -> String {
    let matrix = |what: &str, n: usize, k: usize, output: Output| {
        line(card, what, |m| {
            let gemm = Gemm::choose(gpu, GemmShape { m, n, k, output, format });
            let splits = if let Gemm::Skinny(kernel) = gemm { format!("/{}", kernel.splits()) } else { String::new() };
            (gemm.name(), splits)
        })
    };
    [
        matrix("qkv", 6144, 2560, Output::Bf16),
        matrix("in_proj", 12_352, 2560, Output::Bf16),
        matrix("o", 2560, 4096, Output::SplitK),
        names(card, "gate_up", |m| Swiglu::choose(gpu, (m, 19_456, 2560), format).name()),
        names(card, "down", |m| AddNorm::choose(gpu, (m, 2560, 9728), format).name()),
        matrix("head", 151_936, 2560, Output::F32),
    ]
    .concat()
}

fn decode(gpu: &Gpu, card: &str) -> String {
    let load = |rows: usize| AttentionLoad::of(vec![(1, CONTEXT); rows]);
    let grid = |choice: DecodeStep| {
        let grid = match choice {
            DecodeStep::Fused(grid) => format!("{}x{}", grid.stages, grid.blocks),
            DecodeStep::Separate(Attention { decode: Some(Decode::Async { splits }), .. }) => format!("/{splits}"),
            DecodeStep::Separate(_) => String::new(),
        };
        (choice.name(), grid)
    };
    [
        line(card, "heads 128", |rows| grid(DecodeStep::choose(gpu, QWEN3, KvDType::Bf16, &load(rows), rows))),
        line(card, "heads 256", |rows| {
            grid(DecodeStep::choose_gated(gpu, (QWEN35, 1), KvDType::Bf16, &load(rows), rows))
        }),
    ]
    .concat()
}

fn prefill(gpu: &Gpu, card: &str) -> String {
    let choose = |shape: HeadShape, decoding: usize, tokens: usize| {
        let load = AttentionLoad::of(std::iter::repeat_n((1, CONTEXT), decoding).chain([(tokens, tokens)]));
        let choice = Attention::choose(gpu, shape, KvDType::Bf16, &load, (decoding + 1, decoding + tokens));
        let blocks =
            if let Some(Prefill::Wgmma { blocks, .. }) = choice.prefill { blocks.to_string() } else { String::new() };
        (choice.name(), blocks)
    };
    [
        line(card, "heads 128", |tokens| choose(QWEN3, 0, tokens)),
        line(card, "heads 256", |tokens| choose(QWEN35, 0, tokens)),
        line(card, "40 decode", |tokens| choose(QWEN3, 40, tokens)),
    ]
    .concat()
}

fn delta(gpu: &Gpu, card: &str) -> String {
    let scan = |tokens: usize, segments: usize| {
        let choice = DeltaChunks::choose(gpu, DELTA, tokens, segments);
        let grid = match choice {
            DeltaChunks::Chunked { recurrent: true, scan } => format!("{} and recurrent", scan.blocks),
            DeltaChunks::Chunked { recurrent: false, scan } => scan.blocks.to_string(),
            DeltaChunks::Triton { recurrent: true } => "and recurrent".to_owned(),
            DeltaChunks::Triton { recurrent: false } | DeltaChunks::Recurrent => String::new(),
        };
        (choice.name(), grid)
    };
    [
        line(card, "1 segment", |tokens| scan(tokens, 1)),
        line(card, "4", |tokens| scan(tokens, 4)),
        line(card, "sample", |rows| ("cluster", sample_cluster(gpu, rows).to_string())),
    ]
    .concat()
}

#[test]
fn every_card_chooses_what_the_table_says() {
    type Section = (&'static str, fn(&Gpu, &str) -> String);
    let sections: [Section; 5] = [
        ("GEMMs, by rows of x; after a slash the splits of the columns", bf16),
        ("The same with FP8 weights", fp8),
        ("Attention of rows that decode at 1,100 tokens, by rows; stages x blocks of a KV head, or splits", decode),
        ("Attention of a prompt, by its tokens, alone and with rows that decode; blocks of prefill", prefill),
        ("Gated delta rule of a step, by its tokens, with blocks of the scan; sampling, by rows", delta),
    ];
    let section = |(title, lines): Section| {
        // A build with Triton kernels.
        let gpu = |card: &str| Gpu { triton: true, ..Gpu::named(card).unwrap() };
        let cards = CARDS.map(|card| lines(&gpu(card), card));
        format!("{title}\n\n{}\n", cards.concat())
    };
    let table = sections.map(section).concat();
    assert!(table == include_str!("table.txt"), "the choices changed; they are now\n{table}");
}

#[test]
fn tiles_serve_where_cublaslt_is_missing() {
    let gpu = Gpu { cublaslt: CublasLt::Missing, ..Gpu::PLANNED };
    let name = |m| {
        Gemm::choose(&gpu, GemmShape { m, n: 2560, k: 4096, output: Output::Bf16, format: WeightFormat::Bf16 }).name()
    };
    assert_eq!([96, 97, 512, 1024].map(name), ["skinny_wgmma", "gemm_mma_64", "gemm_mma_64", "gemm_mma_128"]);
    assert_eq!(AddNorm::choose(&gpu, (128, 2560, 4096), WeightFormat::Bf16), AddNorm::Separate(Gemm::TiledMma(64)));
    assert_eq!(Swiglu::choose(&gpu, (128, 512, 64), WeightFormat::Bf16).name(), "gemm_mma_64");
}

#[test]
fn a_plan_records_what_its_card_chooses() {
    for (card, kernel) in [("H200", "skinny_wgmma"), ("L4", "cublaslt")] {
        let mut exec = Exec::meta().unwrap();
        plan_for(&mut exec, Gpu::named(card).unwrap());
        let mut tensor = |shape: [usize; 2]| exec.tensor("operand", &shape, DType::Bf16).unwrap();
        let (x, w, mut out) = (tensor([64, 2560]), tensor([6144, 2560]), tensor([64, 6144]));
        let (result, records) = exec.recording(|exec| ops::linear(exec, &x, &w, &mut out));
        result.unwrap();
        assert_eq!(records[0].kernel, kernel, "{card}");
    }
}
