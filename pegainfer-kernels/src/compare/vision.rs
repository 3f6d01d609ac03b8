//! Ops of vision towers.

use super::call::{Call, Family, Launch, all_written};
use super::case::{EPS, Output, Values};
use super::operands::allocate;
use super::variant::Variant;
use crate::heads::BLOCK_SIZE;
use crate::ops::vision::{self, Gelu, Grid, PATCH, Segments, Then};
use pegainfer_core::exec::Exec;
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError};

pub(super) const FAMILY: Family = Family { has, variants, prepare, fill, launch, outputs };

const OPS: [&str; 15] = [
    "unfold_patches",
    "add_positions",
    "layer_norm",
    "add_bias",
    "add_bias_residual",
    "bias_gelu_tanh",
    "bias_gelu_erf",
    "rotate_grid",
    "segment_attention",
    "grid_attention",
    "linear_bias",
    "linear_bias_residual",
    "linear_bias_gelu_tanh",
    "linear_bias_gelu_erf",
    "copy_rows",
];
/// Bytes of a row of pixels of a patch.
const PATCH_ROW: usize = 3 * PATCH;
/// Of attention's scores: some weights are large.
const SCALE: f32 = 0.5;

fn has(record: &OpRecord) -> bool {
    OPS.contains(&record.op)
}

fn variants(_: &OpRecord) -> Vec<Variant> {
    vec![Variant::Plain]
}

fn prepare(exec: &mut Exec, call: &mut Call<'_>, launch: &mut Launch) -> Result<(), OpError> {
    let (qkv, indptr) = match (call.record.op, &call.read[..], &launch.written[..]) {
        ("grid_attention", [qkv, .., indptr], _) => (qkv, indptr),
        (op, _, [out]) if op.starts_with("linear_bias") => {
            launch.extra = vec![allocate(exec, "sums", out.shape(), DType::F32)?];
            return Ok(());
        }
        _ => return Ok(()),
    };
    let (n, images) = (qkv.shape()[0], indptr.elements() - 1);
    let bytes = vision::scratch_bytes((n, blocks(n, images)), (qkv.shape()[2], qkv.shape()[3]));
    launch.extra = vec![allocate(exec, "scratch", &[bytes], DType::U8)?];
    Ok(())
}

/// The end of image `i` of `images`.
fn end(i: usize, images: usize, n: usize) -> usize {
    if i == images { n } else { i * n / images }
}

/// Blocks that the patches of all images take.
fn blocks(n: usize, images: usize) -> usize {
    Grid::blocks((0..images).map(|i| end(i + 1, images, n) - end(i, images, n)))
}

/// Patches, rows and positions inside what they point into, and segments of nearly the same length.
fn fill(exec: &mut Exec, call: &mut Call<'_>, launch: &mut Launch, values: Values) -> Result<(), OpError> {
    let first = usize::from(values == Values::Earlier);
    let numbers = |count: usize, below: usize| (0..count).map(|i| ((7 * i + first) % below) as u32).collect::<Vec<_>>();
    match (call.record.op, &mut call.read[..], &launch.written[..]) {
        ("unfold_patches", [pixels, patches], _) => {
            let (n, bytes) = (patches.rows_cols().0, pixels.elements());
            let stride = PATCH_ROW * n.clamp(1, 3);
            let starts = numbers(n, bytes - (PATCH - 1) * stride - PATCH_ROW + 1);
            let patch = |start: u32| [start, stride as u32];
            exec.fill_rows(patches, &starts.into_iter().flat_map(patch).collect::<Vec<_>>())
        }
        ("add_positions", [table, rows, _], _) => {
            let numbers = numbers(rows.elements(), table.rows_cols().0);
            exec.fill_rows(rows, &numbers)
        }
        ("rotate_grid", [table, positions], _) => {
            let numbers = numbers(positions.elements(), table.rows_cols().0);
            exec.fill_rows(positions, &numbers)
        }
        ("segment_attention", [qkv, indptr], _) => {
            let (n, images) = (qkv.shape()[0], indptr.elements() - 1);
            exec.fill_rows(indptr, &(0..=images).map(|i| end(i, images, n) as u32).collect::<Vec<_>>())
        }
        ("grid_attention", [qkv, table, positions, slots, indptr], _) => {
            let (n, images) = (qkv.shape()[0], indptr.elements() - 1);
            exec.fill_rows(positions, &numbers(positions.elements(), table.rows_cols().0))?;
            let (mut ends, mut places, mut first) = (vec![0], Vec::new(), 0);
            for rows in (0..images).map(|i| end(i + 1, images, n) - end(i, images, n)) {
                places.extend((first..first + rows).map(|slot| slot as u32));
                first += rows.next_multiple_of(BLOCK_SIZE);
                ends.push(places.len() as u32);
            }
            exec.fill_rows(slots, &places)?;
            exec.fill_rows(indptr, &ends)
        }
        _ => Ok(()),
    }
}

fn launch(exec: &mut Exec, call: &Call<'_>, launch: &mut Launch) -> Result<(), OpError> {
    let Launch { written, extra, .. } = launch;
    match (call.record.op, &call.read[..], &mut written[..]) {
        ("unfold_patches", [pixels, patches], [out]) => vision::unfold_patches(exec, pixels, patches, out),
        ("add_positions", [table, rows, weights], [x]) => vision::add_positions(exec, table, (rows, weights), x),
        ("layer_norm", [x, weight, bias], [out]) => vision::layer_norm(exec, x, (weight, bias), EPS, out),
        ("add_bias", [x, bias], [out]) => vision::add_bias(exec, x, bias, out),
        ("add_bias_residual", [x, bias], [out]) => vision::add_bias_residual(exec, x, bias, out),
        ("bias_gelu_tanh", [x, bias], [out]) => vision::bias_gelu(exec, x, bias, Gelu::Tanh, out),
        ("bias_gelu_erf", [x, bias], [out]) => vision::bias_gelu(exec, x, bias, Gelu::Erf, out),
        ("rotate_grid", [table, positions], [qkv]) => vision::rotate_grid(exec, table, positions, qkv),
        ("segment_attention", [qkv, indptr], [out]) => {
            vision::segment_attention(exec, qkv, Segments { indptr, scores: 0 }, SCALE, out)
        }
        ("grid_attention", [_, table, positions, slots, indptr], [out, qkv]) => {
            let segments = Segments { indptr, scores: 0 };
            let blocks = blocks(qkv.shape()[0], indptr.elements() - 1);
            let grid = (&Grid { table, positions, slots, segments }, blocks);
            let [scratch] = &mut extra[..] else { return Err(call.unknown()) };
            vision::grid_attention(exec, qkv, grid, SCALE, scratch, out)
        }
        // From the middle to the end.
        ("copy_rows", [from], [to]) => {
            let (count, rows) = (from.rows_cols().0, to.rows_cols().0);
            let copied = count.div_ceil(2).min(rows);
            vision::copy_rows(exec, from, count - copied..count, to, rows - copied)
        }
        (op, [x, w, bias], [out]) => {
            let [sums] = &mut extra[..] else { return Err(call.unknown()) };
            vision::linear_bias(exec, x, (w, bias), then(op), sums, out)
        }
        _ => Err(call.unknown()),
    }
}

/// What follows the sum in an op of this name.
fn then(op: &str) -> Then {
    match op {
        "linear_bias_residual" => Then::Add,
        "linear_bias_gelu_tanh" => Then::Gelu(Gelu::Tanh),
        "linear_bias_gelu_erf" => Then::Gelu(Gelu::Erf),
        _ => Then::Store,
    }
}

fn outputs(exec: &Exec, call: &Call<'_>, launch: &Launch) -> Result<Vec<Output>, OpError> {
    let mut outputs = all_written(exec, call, launch)?;
    // What `grid_attention` leaves of its queries and keys depends on the device.
    outputs.truncate(1);
    Ok(outputs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::{Case, compare};
    use crate::ops::HeadShape;
    use pegainfer_core::isa::Isa;
    use pegainfer_core::tensor::Tensor;

    const SHAPE: HeadShape = HeadShape { heads: 1, kv_heads: 1, head_dim: 64 };

    /// Records of all ops for so many patches and heads.
    fn records(n: usize, (heads, head_dim): (usize, usize)) -> Vec<OpRecord> {
        let (exec, hidden) = (&mut Exec::meta().unwrap(), heads * head_dim);
        let tensor = |exec: &mut Exec, shape: &[usize], dtype| exec.tensor("tensor", shape, dtype).unwrap();
        let f32s = |exec: &mut Exec, shape: &[usize]| tensor(exec, shape, DType::F32);
        let u32s = |exec: &mut Exec, shape: &[usize]| tensor(exec, shape, DType::U32);
        let mut x = tensor(exec, &[n, hidden], DType::Bf16);
        let mut unfolded = tensor(exec, &[n, vision::COPIES * vision::PATCH_VALUES], DType::Bf16);
        let (pixels, patches) = (tensor(exec, &[n * vision::PATCH_VALUES], DType::U8), u32s(exec, &[n, 2]));
        let (table, rows, weights) =
            (tensor(exec, &[30, hidden], DType::Bf16), u32s(exec, &[n, 4]), f32s(exec, &[n, 4]));
        let (sums, bias, weight) = (f32s(exec, &[n, hidden]), f32s(exec, &[hidden]), f32s(exec, &[hidden]));
        let mut qkv = tensor(exec, &[n, 3, heads, head_dim], DType::Bf16);
        let (angles, places, indptr) = (f32s(exec, &[50, head_dim / 2]), u32s(exec, &[n, 2]), u32s(exec, &[4]));
        let (slots, mut scratch) = (u32s(exec, &[n]), tensor(exec, &[1 << 20], DType::U8));
        let mut all = |exec: &mut Exec, out: &mut Tensor| -> Result<(), OpError> {
            vision::unfold_patches(exec, &pixels, &patches, &mut unfolded)?;
            vision::add_positions(exec, &table, (&rows, &weights), &mut x)?;
            vision::layer_norm(exec, &x, (&weight, &bias), EPS, out)?;
            vision::add_bias(exec, &sums, &bias, out)?;
            vision::add_bias_residual(exec, &sums, &bias, out)?;
            vision::bias_gelu(exec, &sums, &bias, Gelu::Tanh, out)?;
            vision::bias_gelu(exec, &sums, &bias, Gelu::Erf, out)?;
            vision::rotate_grid(exec, &angles, &places, &mut qkv)?;
            let segments = Segments { indptr: &indptr, scores: 0 };
            vision::segment_attention(exec, &qkv, segments, SCALE, out)?;
            let grid = Grid { table: &angles, positions: &places, slots: &slots, segments };
            vision::grid_attention(exec, &mut qkv, (&grid, n), SCALE, &mut scratch, out)
        };
        let mut out = tensor(exec, &[n, hidden], DType::Bf16);
        let (done, records) = exec.recording(|exec| all(exec, &mut out));
        done.unwrap();
        records
    }

    #[test]
    fn instruction_sets_agree_on_every_op() {
        let case = Case { shape: SHAPE, context: 1, rope_theta: 1e4, exact_in_fp8: false };
        for (n, heads) in [(3, (2, 64)), (29, (2, 72)), (70, (1, 16))] {
            let records = records(n, heads);
            // Small heads have the two ops instead of the last.
            let ops: Vec<&str> = records.iter().map(|record| record.op).collect();
            assert!(ops[..9] == OPS[..9] && (ops[9..] == OPS[9..10] || ops[9..] == OPS[7..9]), "{ops:?}");
            for (record, isa) in
                records.iter().flat_map(|record| Isa::available().into_iter().map(move |isa| (record, isa)))
            {
                let mut cpus = [Isa::available()[0], isa].map(|isa| Exec::cpu(isa, Some(2)).unwrap());
                let [reference, tested] = &mut cpus;
                let found = compare(reference, tested, record, &case).unwrap().unwrap();
                assert!(found.ok(), "{} of {n} patches on {}: {:?}", record.op, isa.name(), found.failures);
            }
        }
    }
}
