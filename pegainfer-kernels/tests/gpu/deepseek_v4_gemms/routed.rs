//! The routed experts at many tokens, FP4 weights: half of the experts that tokens choose are here.

use super::data;
use pegainfer_core::exec::Exec;
use pegainfer_core::rng;
use pegainfer_core::tensor::{DType, Tensor};
use pegainfer_kernels::ops::Matrix;
use pegainfer_kernels::ops::deepseek_v4::{self as ops, ExpertMath, Experts};

const HIDDEN: usize = 1024;
const WIDTH: usize = 512;
const EXPERTS: usize = 8;
/// Number of the first expert that is here, of twice as many.
const FIRST: usize = 4;
const TOP: usize = 4;
const MATH: ExpertMath = ExpertMath { limit: 10.0, quantize: true };
/// Tokens of the calls that are repeated, and how often they are.
const REPEATED: [usize; 2] = [64, 300];
const REPEATS: usize = 300;
/// Tokens of a call, one number for each size of tiles, and an expert's tokens that need several tiles.
const TOKENS: [usize; 4] = [40, 120, 300, 1100];
/// What the root mean square of a row's differences may be, relative to that of the row. The tensor cores' sums have about 14 bits, so that
/// one in 200 values of SwiGLU is rounded to the neighbouring value of FP8, sometimes a whole group of 128 by another power of two: a row is
/// off by 0.1 % in the mean, and the worst of 5,000 by 4 % (computed with such sums); 2.2 % of 300 tokens and 4.7 % of 1,100 on an H200.
const TOLERANCE: f64 = 1.0 / 12.0;
/// The same for the mean of all rows, which such roundings hardly change.
const MEAN_TOLERANCE: f64 = 1.0 / 64.0;

fn weight(exec: &mut Exec, (n, k): (usize, usize), seed: u64) -> Matrix {
    let mut weight = exec.tensor("w", &[n, k / 2], DType::U8).unwrap();
    data::fill(exec, &mut weight, |i| (rng::bits(seed, i as u64) >> 40) as u8);
    let mut scale = exec.tensor("scale", &[n, k / 32], DType::U8).unwrap();
    let least = 123 - k.ilog2() as u8 / 2;
    data::fill(exec, &mut scale, |i| least + (rng::bits(seed ^ 1, i as u64) >> 40) as u8 % 4);
    Matrix::Fp4 { weight, scale }
}

fn experts(exec: &mut Exec, (count, width, hidden): (usize, usize, usize)) -> Experts {
    let (gate_up, down) = ((count * width, hidden), (count * hidden, width));
    let [gate, up, down] = [(gate_up, 11), (gate_up, 13), (down, 17)].map(|(shape, seed)| weight(exec, shape, seed));
    Experts { gate, up, down, count }
}

/// Activations that FP8 holds.
fn rounded(exec: &mut Exec, tokens: usize, hidden: usize) -> Tensor {
    let mut x = data::activations(exec, &[tokens, hidden], false, 1);
    ops::round_activation(exec, &mut x).unwrap();
    x
}

/// `top` different experts of `all` for each token, every third from one of the first `firsts` on; and their weights.
fn choice(exec: &mut Exec, (tokens, top): (usize, usize), (firsts, all): (u64, u64)) -> (Tensor, Tensor) {
    let shape = [tokens, top];
    let (mut chosen, mut weights) =
        (exec.tensor("chosen", &shape, DType::U32).unwrap(), exec.tensor("weights", &shape, DType::F32).unwrap());
    let number = |token: usize| rng::bits(19, token as u64) >> 40;
    let rows = |token: usize| (0..top).map(move |i| ((number(token) % firsts + 3 * i as u64) % all) as u32);
    exec.fill_rows(&mut chosen, &(0..tokens).flat_map(rows).collect::<Vec<u32>>()).unwrap();
    let weight = |i: usize| 0.1 + (rng::bits(23, i as u64) >> 40) as f32 / (1u64 << 25) as f32;
    exec.fill_rows(&mut weights, &(0..tokens * top).map(weight).collect::<Vec<f32>>()).unwrap();
    (chosen, weights)
}

fn outputs(exec: &mut Exec, experts: &Experts, tokens: usize) -> Vec<f32> {
    let x = rounded(exec, tokens, HIDDEN);
    // The first experts more often.
    let (chosen, weights) = choice(exec, (tokens, TOP), (7, 2 * EXPERTS as u64));
    let shared = data::activations(exec, &[tokens, HIDDEN], false, 5);
    let mut out = exec.tensor("out", &[tokens, HIDDEN], x.dtype()).unwrap();
    ops::routed_experts(exec, &x, (&chosen, &weights), (experts, FIRST), MATH, Some(&shared), &mut out).unwrap();
    data::rows(exec, &out, &(0..tokens).collect::<Vec<_>>())
}

/// The root mean square of the differences of two rows, relative to that of the second.
fn difference((got, expected): (&[f32], &[f32])) -> f64 {
    let squares = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>();
    let all = squares(&mut expected.iter().copied());
    let off = squares(&mut got.iter().zip(expected).map(|(a, b)| a - b));
    if off == 0.0 { 0.0 } else { (off / all).sqrt() }
}

/// Whether all numbers of tokens agree.
pub fn agrees(gpu: &mut Exec, cpu: &mut Exec) -> bool {
    let shape = (EXPERTS, WIDTH, HIDDEN);
    let (here, host) = (experts(gpu, shape), experts(cpu, shape));
    let of_tokens = |tokens: &usize| {
        let (got, expected) = (outputs(gpu, &here, *tokens), outputs(cpu, &host, *tokens));
        let errors: Vec<f64> = got.chunks(HIDDEN).zip(expected.chunks(HIDDEN)).map(difference).collect();
        let (error, mean) =
            (errors.iter().copied().fold(0.0, data::worse), errors.iter().sum::<f64>() / errors.len() as f64);
        println!("{:<12} {tokens:>5} {WIDTH:>6} {HIDDEN:>5}  error {error:.2e}  mean {mean:.2e}", "routed");
        error <= TOLERANCE && mean <= MEAN_TOLERANCE
    };
    TOKENS.iter().map(of_tokens).fold(true, |all, good| all & good)
}

/// Whether the op repeats its bits, with the experts of a rank of two of DeepSeek-V4-Flash, so that a block has many tiles. 300 calls,
/// because what they find is rare: a ring of weights that was filled before it was read changed one call in 60.
pub fn repeats(gpu: &mut Exec) -> bool {
    const HIDDEN: usize = 4096;
    const TOP: usize = 6;
    let here = experts(gpu, (256, 1024, HIDDEN));
    let of_tokens = |tokens: &usize| {
        let x = rounded(gpu, *tokens, HIDDEN);
        let (chosen, weights) = choice(gpu, (*tokens, TOP), (256, 256));
        let mut out = gpu.tensor("out", &[*tokens, HIDDEN], x.dtype()).unwrap();
        let all: Vec<usize> = (0..*tokens).collect();
        let mut call = || {
            ops::routed_experts(gpu, &x, (&chosen, &weights), (&here, 0), MATH, None, &mut out).unwrap();
            data::rows(gpu, &out, &all)
        };
        let first = call();
        let others = (0..REPEATS).filter(|_| call() != first).count();
        println!("{:<12} {tokens:>5}   1024  {HIDDEN}  {others} of {REPEATS} calls differ", "repeated");
        others == 0
    };
    REPEATED.iter().map(of_tokens).fold(true, |all, good| all & good)
}
