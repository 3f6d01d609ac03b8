//! All layers of a decode step of few rows.

use super::check::Check;
use super::{AttentionBatch, attention, decode_attention, linear, linear_add_norm, linear_swiglu, qkv, rms_norm};
use crate::cuda;
use crate::decode_model::DecodeModel;
use crate::heads::Heads;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

use crate::cuda::{DECODE_LAYERS_ROWS, DecodeState};

/// Scratch for the intermediates of the separate ops, in their shapes. Contents afterwards are device-dependent.
#[derive(Debug)]
pub struct DecodeScratch<'a> {
    /// `[rows, hidden]`.
    pub delta: &'a mut Tensor,
    /// `[rows, (heads + 2 kv_heads) * head_dim]`.
    pub qkv: &'a mut Tensor,
    /// `[rows, heads * head_dim]`.
    pub q: &'a mut Tensor,
    /// `[rows, heads * head_dim]`.
    pub attended: &'a mut Tensor,
    /// `[rows, 2 * intermediate]`.
    pub gate_up: &'a mut Tensor,
    /// `[rows, intermediate]`.
    pub activated: &'a mut Tensor,
}

/// From the residual stream after the embedding to `normed`, its value under the final norm, for rows of one token
/// each.
///
/// Equals [`rms_norm`], and for each layer [`linear`], [`decode_attention`], [`linear_add_norm`], [`linear_swiglu`] and
/// [`linear_add_norm`], with their roundings. `residual`, `normed`: `[rows, hidden]` bf16; `at` (positions and slots)
/// and `batch` as in `decode_attention`, for rows that attend at least to their own token. With `state`, a GPU runs up
/// to [`DECODE_LAYERS_ROWS`] rows in one kernel, which adds in a different order; otherwise these ops run.
#[expect(clippy::too_many_arguments, reason = "the operands of a whole model")]
pub fn decode_layers(
    exec: &mut Exec,
    model: &mut DecodeModel<'_>,
    state: Option<&mut DecodeState>,
    at: (&Tensor, &Tensor),
    batch: &AttentionBatch<'_>,
    scratch: &mut DecodeScratch<'_>,
    residual: &mut Tensor,
    normed: &mut Tensor,
) -> Result<(), OpError> {
    check(exec.device(), model, at, batch, scratch, residual, normed)?;
    let state = state.filter(|_| residual.rows_cols().0 <= DECODE_LAYERS_ROWS);
    exec.record(|device| {
        let kernel = match device {
            Device::Cpu(isa) => isa.name(),
            Device::Cuda | Device::Meta if state.is_some() => "one_kernel",
            Device::Cuda | Device::Meta => "separate",
        };
        record(kernel, model, at, batch, residual, normed)
    });
    match (exec.device(), state) {
        (Device::Cuda, Some(state)) => cuda::decode_layers(exec, model, state, at.1, batch, residual, normed),
        _ => exec.unrecorded(|exec| separately(exec, model, at, batch, scratch, residual, normed)),
    }
}

/// Runs the separate ops.
fn separately(
    exec: &mut Exec,
    model: &mut DecodeModel<'_>,
    at: (&Tensor, &Tensor),
    batch: &AttentionBatch<'_>,
    scratch: &mut DecodeScratch<'_>,
    residual: &mut Tensor,
    normed: &mut Tensor,
) -> Result<(), OpError> {
    let (shape, eps, rope) = (model.shape, model.eps, model.rope);
    let DecodeScratch { delta, qkv, q, attended, gate_up, activated } = scratch;
    let mut layers = model.layers.iter_mut().peekable();
    if let Some(first) = layers.peek() {
        rms_norm(exec, residual, first.input_norm, eps, &mut *normed)?;
    }
    while let Some(layer) = layers.next() {
        let cache = (&mut *layer.cache.0, &mut *layer.cache.1);
        linear(exec, normed, layer.qkv, qkv)?;
        let heads = Heads { shape, norms: layer.head_norms, eps, rope, positions: at.0, slots: at.1 };
        decode_attention(exec, qkv, &heads, batch, cache, q, &mut **attended)?;
        linear_add_norm(exec, attended, layer.o, residual, layer.post_norm, eps, delta, &mut *normed)?;
        linear_swiglu(exec, normed, layer.gate_up, gate_up, &mut **activated)?;
        let next = layers.peek().map_or(model.final_norm, |next| next.input_norm);
        linear_add_norm(exec, activated, layer.down, residual, next, eps, delta, &mut *normed)?;
    }
    Ok(())
}

/// Checks shapes and dtypes of the operands.
fn check(
    device: Device,
    model: &DecodeModel<'_>,
    at: (&Tensor, &Tensor),
    batch: &AttentionBatch<'_>,
    scratch: &DecodeScratch<'_>,
    residual: &Tensor,
    normed: &Tensor,
) -> Result<(), OpError> {
    let check = Check("decode_layers");
    let (shape, (hidden, width)) = (model.shape, model.widths());
    let rows = residual.rows_cols().0;
    check.that(!model.layers.is_empty(), "there are no layers")?;
    let (load, one) = (batch.load, (1, 1));
    check.that((load.min_queries, load.max_queries) == one, "a row does not have exactly one query")?;
    check.that(load.min_context > 0, "a row attends to nothing")?;
    check.that(batch.block_tables.rows_cols().0 == rows, "rows and tokens differ in number")?;
    for tensor in [residual, normed, &*scratch.delta] {
        check.is(tensor, DType::Bf16, &[rows, hidden])?;
    }
    check.is(scratch.gate_up, DType::Bf16, &[rows, 2 * width])?;
    check.is(scratch.activated, DType::Bf16, &[rows, width])?;
    check.is(model.final_norm, DType::Bf16, &[hidden])?;
    for layer in &model.layers {
        let cache = (&*layer.cache.0, &*layer.cache.1);
        let (norms, (positions, slots)) = (layer.head_norms, at);
        let heads = Heads { shape, norms, eps: model.eps, rope: model.rope, positions, slots };
        qkv::check(check, device, scratch.qkv, &heads, scratch.q, cache)?;
        attention::check(check, device, scratch.q, cache, batch, shape, scratch.attended)?;
        check.is(layer.input_norm, DType::Bf16, &[hidden])?;
        check.is(layer.post_norm, DType::Bf16, &[hidden])?;
        layer.qkv.check_dense(check, device, (shape.qkv_width(), hidden))?;
        layer.o.check_dense(check, device, (hidden, shape.q_width()))?;
        layer.gate_up.check_dense(check, device, (2 * width, hidden))?;
        layer.down.check_dense(check, device, (hidden, width))?;
    }
    Ok(())
}

/// Reads weights, the tokens that rows attend to, and a few rows; activations stay in caches.
fn record(
    kernel: &'static str,
    model: &DecodeModel<'_>,
    at: (&Tensor, &Tensor),
    batch: &AttentionBatch<'_>,
    residual: &Tensor,
    normed: &Tensor,
) -> OpRecord {
    let (rows, (hidden, width), shape) = (residual.rows_cols().0, model.widths(), model.shape);
    let tables = [batch.qo_indptr, batch.kv_lens, batch.block_tables];
    let mut reads = vec![residual, model.final_norm, model.rope, at.0, at.1, tables[0], tables[1], tables[2]];
    let mut writes = vec![residual, normed];
    let rotated = 10 * rows * (shape.heads + shape.kv_heads) * shape.head_dim;
    let token = 2 * shape.kv_heads * shape.head_dim; // elements of a token's keys and values
    let mut elements = (3 * rows + 1) * hidden + rows * 2 * shape.head_dim; // a row of rope is f32
    let (mut flops, mut weight_bytes) = (4 * (rows * hidden) as u64, 0);
    for layer in &model.layers {
        let matrices = [layer.qkv, layer.o, layer.gate_up, layer.down];
        let weights: usize = matrices.iter().map(|w| w.shape().0 * w.shape().1).sum();
        weight_bytes += matrices.iter().map(|w| w.bytes()).sum::<u64>();
        elements += 2 * hidden + 2 * shape.head_dim + (batch.load.cached as usize + rows) * token;
        flops += (2 * rows * weights + rotated + 5 * rows * width + 10 * rows * hidden) as u64;
        flops += attention::flops(batch, shape);
        let (cache, norms) = (&layer.cache, layer.head_norms);
        reads.extend(layer.qkv.reads(&[layer.input_norm], &[norms.0, norms.1, cache.0, cache.1]));
        reads.extend(layer.o.reads(&[], &[layer.post_norm]));
        reads.extend(layer.gate_up.tensors().into_iter().chain(layer.down.tensors()));
        writes.extend([&*cache.0, &*cache.1]);
    }
    let bytes = (elements * DType::Bf16.size()) as u64 + weight_bytes;
    OpRecord::new("decode_layers", kernel, &reads, &writes, flops).with_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heads::{HeadShape, KvDType};
    use crate::load::AttentionLoad;
    use crate::ops::{DecodeLayer, MatrixRef, rope_table};
    use crate::testing::{Host, bf16s};
    use half::bf16;

    const SHAPE: HeadShape = HeadShape { heads: 4, kv_heads: 2, head_dim: 64 };
    const HIDDEN: usize = 96;
    const WIDTH: usize = 160;
    const BLOCKS: usize = 4;

    /// A layer's weights, in the order of [`DecodeLayer`], then its caches.
    fn layer(host: &mut Host, seed: u64) -> ([Tensor; 8], [Tensor; 2]) {
        let weights: [&[usize]; 8] = [
            &[HIDDEN],
            &[SHAPE.qkv_width(), HIDDEN],
            &[SHAPE.head_dim],
            &[SHAPE.head_dim],
            &[HIDDEN, SHAPE.q_width()],
            &[HIDDEN],
            &[2 * WIDTH, HIDDEN],
            &[HIDDEN, WIDTH],
        ];
        let mut tensor = |shape: &[usize], seed| host.bf16("layer", shape, &bf16s(shape.iter().product(), seed));
        let weights = std::array::from_fn(|i| tensor(weights[i], 10 * seed + i as u64));
        (weights, SHAPE.cache(Device::Meta, KvDType::Bf16, BLOCKS).map(|shape| tensor(&shape, seed)))
    }

    /// Every operand for two rows.
    struct Operands {
        layers: Vec<([Tensor; 8], [Tensor; 2])>,
        scratch: [Tensor; 6],
        residual: Tensor,
        normed: Tensor,
    }

    impl Operands {
        fn new(host: &mut Host) -> Self {
            let layers = (1..3).map(|seed| layer(host, seed)).collect();
            let (qkv, q) = (SHAPE.qkv_width(), SHAPE.q_width());
            let widths = [HIDDEN, qkv, q, q, 2 * WIDTH, WIDTH];
            let scratch = widths.map(|width| host.zeros("scratch", &[2, width], DType::Bf16));
            let residual = host.bf16("residual", &[2, HIDDEN], &bf16s(2 * HIDDEN, 5));
            Self { layers, scratch, residual, normed: host.zeros("normed", &[2, HIDDEN], DType::Bf16) }
        }

        fn results(&self) -> Vec<&[bf16]> {
            let caches = self.layers.iter().flat_map(|(_, caches)| caches.iter().map(Tensor::host));
            caches.chain([self.residual.host(), self.normed.host()]).collect()
        }
    }

    #[test]
    fn it_is_the_separate_ops_and_one_record() {
        Host::each(|mut host| {
            let rope = rope_table(&mut host.exec, 64, SHAPE.head_dim, 1e6).unwrap();
            let (eps, final_norm) = (1e-6, host.bf16("final_norm", &[HIDDEN], &bf16s(HIDDEN, 7)));
            let at = (&host.u32("positions", &[19, 4]), &host.u32("slots", &[16 + 3, 2 * 16 + 4]));
            let mut block_tables = host.zeros("block_tables", &[2, 2], DType::U32);
            block_tables.host_mut::<u32>().copy_from_slice(&[3, 1, 2, 0]);
            let batch = AttentionBatch {
                qo_indptr: &host.u32("qo_indptr", &[0, 1, 2]),
                kv_lens: &host.u32("kv_lens", &[20, 5]),
                block_tables: &block_tables,
                load: AttentionLoad::of([(1, 20), (1, 5)]),
            };
            let mut one = Operands::new(&mut host);
            let mut apart = Operands::new(&mut host);
            let exec = &mut host.exec;

            let Operands { layers, scratch, residual, normed } = &mut one;
            let mut model = DecodeModel {
                layers: layers.iter_mut().map(decode_layer).collect(),
                final_norm: &final_norm,
                rope: &rope,
                shape: SHAPE,
                eps,
            };
            let [delta, qkv, q, attended, gate_up, activated] = scratch;
            let mut scratch = DecodeScratch { delta, qkv, q, attended, gate_up, activated };
            let (done, records) = exec
                .recording(|exec| decode_layers(exec, &mut model, None, at, &batch, &mut scratch, residual, normed));
            done.unwrap();

            let Operands { layers, scratch, residual, normed } = &mut apart;
            let [delta, qkv, q, attended, gate_up, activated] = scratch;
            rms_norm(exec, residual, &layers[0].0[0], eps, &mut *normed).unwrap();
            for l in 0..2 {
                let (before, after) = layers.split_at_mut(l + 1);
                let ([_, qkv_w, q_norm, k_norm, o, post_norm, gate_up_w, down], [k, v]) = &mut before[l];
                let next = after.first().map_or(&final_norm, |(next, _)| &next[0]);
                linear(exec, normed, qkv_w, qkv).unwrap();
                let norms = (&*q_norm, &*k_norm);
                let heads = Heads { shape: SHAPE, norms, eps, rope: &rope, positions: at.0, slots: at.1 };
                decode_attention(exec, qkv, &heads, &batch, (k, v), q, &mut *attended).unwrap();
                linear_add_norm(exec, attended, o, residual, post_norm, eps, delta, &mut *normed).unwrap();
                linear_swiglu(exec, normed, gate_up_w, gate_up, &mut *activated).unwrap();
                linear_add_norm(exec, activated, down, residual, next, eps, delta, &mut *normed).unwrap();
            }
            assert!(one.results() == apart.results());
            let weights: u64 = apart.layers.iter().flat_map(|(weights, _)| weights).map(Tensor::bytes).sum();
            let [record] = &records[..] else { panic!("{records:?}") };
            assert!(record.bytes > weights && record.bytes < 2 * weights);
        });
    }

    fn decode_layer((weights, caches): &mut ([Tensor; 8], [Tensor; 2])) -> DecodeLayer<'_> {
        let [input_norm, qkv, q_norm, k_norm, o, post_norm, gate_up, down] = &*weights;
        let [k, v] = caches;
        let [qkv, o, gate_up, down] = [qkv, o, gate_up, down].map(MatrixRef::from);
        DecodeLayer { input_norm, qkv, head_norms: (q_norm, k_norm), cache: (k, v), o, post_norm, gate_up, down }
    }
}
