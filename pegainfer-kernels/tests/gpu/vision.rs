//! Ops of vision towers on a GPU: their difference from the CPU reference as `pegainfer doctor` has it, and their time.
//!
//! Times are of a CUDA graph of one op, whose operands stay in the L2 if they fit.

use super::{CASE, seconds};
use pegainfer_core::exec::Exec;
use pegainfer_core::isa::Isa;
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, Tensor};
use pegainfer_kernels::compare::compare;
use pegainfer_kernels::cuda;
use pegainfer_kernels::ops::vision::{self, COPIES, Gelu, Grid, PATCH_VALUES, Segments, Then, scratch_bytes};

/// Towers of Qwen3.5: name, heads, values of a head, width of the MLP.
const TOWERS: [(&str, usize, usize, usize); 4] =
    [("tiny", 4, 16, 160), ("0.8B", 12, 64, 3072), ("4B", 16, 64, 4096), ("27B", 16, 72, 4304)];
/// Patches and images.
const SHAPES: [(usize, usize); 4] = [(4, 1), (200, 3), (1024, 1), (2600, 2)];
/// Of the timed ones.
const TIMED: [(usize, usize); 3] = [(1024, 1), (4096, 1), (16_384, 4)];

/// The operands of all ops.
struct Operands {
    pixels: Tensor,
    patches: Tensor,
    unfolded: Tensor,
    positions: [Tensor; 3],
    vectors: [Tensor; 2],
    sums: Tensor,
    wide: Tensor,
    x: Tensor,
    qkv: Tensor,
    angles: Tensor,
    places: Tensor,
    indptr: Tensor,
    slots: Tensor,
    scratch: Tensor,
    weight: Tensor,
}

impl Operands {
    fn new(
        exec: &mut Exec,
        (n, images): (usize, usize),
        (_, heads, head_dim, width): (&str, usize, usize, usize),
    ) -> Self {
        let hidden = heads * head_dim;
        let mut tensor = |shape: &[usize], dtype| exec.tensor("tensor", shape, dtype).unwrap();
        Self {
            pixels: tensor(&[n * PATCH_VALUES], DType::U8),
            patches: tensor(&[n, 2], DType::U32),
            unfolded: tensor(&[n, COPIES * PATCH_VALUES], DType::Bf16),
            positions: [tensor(&[2304, hidden], DType::Bf16), tensor(&[n, 4], DType::U32), tensor(&[n, 4], DType::F32)],
            vectors: [tensor(&[hidden], DType::F32), tensor(&[width], DType::F32)],
            sums: tensor(&[n, width], DType::F32),
            wide: tensor(&[n, width], DType::Bf16),
            x: tensor(&[n, hidden], DType::Bf16),
            qkv: tensor(&[n, 3, heads, head_dim], DType::Bf16),
            angles: tensor(&[4096, head_dim / 2], DType::F32),
            places: tensor(&[n, 2], DType::U32),
            indptr: tensor(&[images + 1], DType::U32),
            slots: tensor(&[n], DType::U32),
            weight: tensor(&[width, hidden], DType::Bf16),
            scratch: tensor(&[scratch_bytes((n, n / 16 + images), (heads, head_dim))], DType::U8),
        }
    }

    /// Op number `i`, if there is one.
    fn call(&mut self, exec: &mut Exec, i: usize) -> bool {
        let Self { pixels, patches, unfolded, positions, vectors, sums, wide, x, qkv, angles, places, indptr, .. } =
            self;
        let (slots, weight, scratch) = (&self.slots, &self.weight, &mut self.scratch);
        let [table, rows, weights] = positions;
        let [narrow, bias] = vectors;
        let done = match i {
            0 => vision::unfold_patches(exec, pixels, patches, unfolded),
            1 => vision::add_positions(exec, table, (rows, weights), x),
            2 => qkv.as_shape(x.shape(), DType::Bf16, |out| vision::layer_norm(exec, x, (narrow, narrow), 1e-6, out)),
            3 => vision::add_bias(exec, sums, bias, wide),
            4 => vision::add_bias_residual(exec, sums, bias, wide),
            5 => vision::bias_gelu(exec, sums, bias, Gelu::Tanh, wide),
            6 => vision::bias_gelu(exec, sums, bias, Gelu::Erf, wide),
            7 => vision::rotate_grid(exec, angles, places, qkv),
            8 => vision::segment_attention(exec, qkv, Segments { indptr, scores: 0 }, 0.125, x),
            9 => {
                let segments = Segments { indptr, scores: 0 };
                let grid = Grid { table: angles, positions: places, slots, segments };
                vision::grid_attention(exec, qkv, (&grid, slots.elements().div_ceil(16)), 0.125, scratch, x)
            }
            10..14 => {
                let then = [Then::Store, Then::Add, Then::Gelu(Gelu::Tanh), Then::Gelu(Gelu::Erf)][i - 10];
                vision::linear_bias(exec, x, (weight, bias), then, sums, wide)
            }
            _ => return false,
        };
        done.unwrap();
        true
    }
}

fn records(shape: (usize, usize), tower: (&str, usize, usize, usize)) -> Vec<OpRecord> {
    let exec = &mut Exec::meta().unwrap();
    let mut operands = Operands::new(exec, shape, tower);
    let (_, records) = exec.recording(|exec| (0..).take_while(|i| operands.call(exec, *i)).count());
    records
}

/// Compares and times all ops. Returns whether everything agreed.
pub fn run() -> bool {
    let (mut gpu, mut cpu) = (cuda::open(0, None).unwrap(), Exec::cpu(Isa::best(), None).unwrap());
    let mut good = true;
    for (tower, shape) in TOWERS.into_iter().flat_map(|tower| SHAPES.map(|shape| (tower, shape))) {
        for record in records(shape, tower) {
            let found = compare(&mut cpu, &mut gpu, &record, &CASE).unwrap().unwrap();
            let failures = found.failures.join("; ");
            if !found.ok() || record.op == "grid_attention" {
                println!("{:<5} {:>5} patches {:<18} {:>9.2e} {failures}", tower.0, shape.0, record.op, found.relative);
            }
            good &= found.ok();
        }
    }
    for (tower, shape) in [TOWERS[2], TOWERS[3]].into_iter().flat_map(|tower| TIMED.map(|shape| (tower, shape))) {
        time(&mut gpu, shape, tower);
    }
    println!("{}", if good { "all agree" } else { "FAILED" });
    good
}

fn time(gpu: &mut Exec, (n, images): (usize, usize), tower: (&str, usize, usize, usize)) {
    let mut operands = Operands::new(gpu, (n, images), tower);
    let ends: Vec<u32> = (0..=images).map(|i| (i * n / images) as u32).collect();
    gpu.fill_rows(&mut operands.indptr, &ends).unwrap();
    gpu.fill_rows(&mut operands.slots, &(0..n as u32).collect::<Vec<_>>()).unwrap();
    let patches: Vec<u32> = (0..n).flat_map(|_| [0, 48]).collect();
    gpu.fill_rows(&mut operands.patches, &patches).unwrap();
    let names: Vec<&str> = records((n, images), tower).iter().map(|record| record.op).collect();
    let times = names.iter().enumerate().map(|(i, name)| {
        let seconds = seconds(gpu, |gpu| assert!(operands.call(gpu, i)));
        let (squares, width) = ((n / images).pow(2) * images, tower.1 * tower.2);
        let rate = if name.ends_with("attention") { 4e-12 * (squares * width) as f64 / seconds } else { 0.0 };
        let rate = if name.starts_with("linear_bias") { 2e-12 * (n * width * tower.3) as f64 / seconds } else { rate };
        let rate = if rate > 0.0 { format!(" ({rate:.0} TFLOP/s)") } else { String::new() };
        format!("{name} {:.1} us{rate}", seconds * 1e6)
    });
    println!("{:<5} {n:>5} patches of {images}: {}", tower.0, times.collect::<Vec<_>>().join(", "));
}
