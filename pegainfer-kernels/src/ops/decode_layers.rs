//! All layers of a decode step of few rows.

use super::check::Check;
use super::{AttentionBatch, attention, decode_attention, linear, linear_add_norm, linear_swiglu, qkv, rms_norm};
use crate::cuda;
use crate::heads::HeadShape;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

pub use crate::cuda::{DECODE_LAYERS_ROWS, DecodeState};

/// One layer of a [`DecodeModel`], all bf16.
#[derive(Debug)]
pub struct DecodeLayer<'a> {
    /// `[hidden]`.
    pub input_norm: &'a Tensor,
    /// Queries, keys, values: `[(heads + 2 kv_heads) * head_dim, hidden]`.
    pub qkv: &'a Tensor,
    /// Of queries and of keys, `[head_dim]`.
    pub head_norms: (&'a Tensor, &'a Tensor),
    /// Keys and values, see [`HeadShape::cache`].
    pub cache: (&'a mut Tensor, &'a mut Tensor),
    /// `[hidden, heads * head_dim]`.
    pub o: &'a Tensor,
    /// `[hidden]`.
    pub post_norm: &'a Tensor,
    /// Gate, then up: `[2 * intermediate, hidden]`.
    pub gate_up: &'a Tensor,
    /// `[hidden, intermediate]`.
    pub down: &'a Tensor,
}

/// What is the same in every step.
#[derive(Debug)]
pub struct DecodeModel<'a> {
    /// First to last, at least one.
    pub layers: Vec<DecodeLayer<'a>>,
    /// `[hidden]` bf16.
    pub final_norm: &'a Tensor,
    /// See [`rope_table`](super::rope_table).
    pub rope: &'a Tensor,
    /// Heads of all layers.
    pub shape: HeadShape,
    /// Of all norms.
    pub eps: f32,
}

impl DecodeModel<'_> {
    /// Hidden and intermediate size.
    pub(crate) fn widths(&self) -> (usize, usize) {
        (self.final_norm.elements(), self.layers.first().map_or(0, |layer| layer.down.rows_cols().1))
    }
}

/// Room for what the separate ops hand on, shaped as there. What it holds afterwards depends on the device.
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

/// From the residual stream after the embedding to `normed`, its value under the final norm, for rows of one token each.
///
/// It is [`rms_norm`], and for each layer [`linear`], [`decode_attention`], [`linear_add_norm`], [`linear_swiglu`] and
/// [`linear_add_norm`], in their roundings. `residual`, `normed`: `[rows, hidden]` bf16; `at` (positions and slots) and
/// `batch` as in `decode_attention`. With `state`, a GPU takes up to [`DECODE_LAYERS_ROWS`] rows in one kernel, whose sums
/// have another order; otherwise these ops run.
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

/// The ops that it is made of.
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
        rms_norm(exec, residual, first.input_norm, eps, normed)?;
    }
    while let Some(layer) = layers.next() {
        let cache = (&mut *layer.cache.0, &mut *layer.cache.1);
        linear(exec, normed, layer.qkv, qkv)?;
        decode_attention(exec, qkv, layer.head_norms, rope, at, batch, shape, eps, cache, q, attended)?;
        linear_add_norm(exec, attended, layer.o, residual, layer.post_norm, eps, delta, normed)?;
        linear_swiglu(exec, normed, layer.gate_up, gate_up, activated)?;
        let next = layers.peek().map_or(model.final_norm, |next| next.input_norm);
        linear_add_norm(exec, activated, layer.down, residual, next, eps, delta, normed)?;
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
    check.that(batch.queries == (1, 1), "a row has another number of queries than one")?;
    check.that(batch.block_tables.rows_cols().0 == rows, "rows and tokens differ in number")?;
    for tensor in [residual, normed, &*scratch.delta] {
        check.is(tensor, DType::Bf16, &[rows, hidden])?;
    }
    check.is(scratch.gate_up, DType::Bf16, &[rows, 2 * width])?;
    check.is(scratch.activated, DType::Bf16, &[rows, width])?;
    check.is(model.final_norm, DType::Bf16, &[hidden])?;
    for layer in &model.layers {
        let cache = (&*layer.cache.0, &*layer.cache.1);
        qkv::check(check, device, scratch.qkv, layer.head_norms, model.rope, at, shape, scratch.q, cache)?;
        attention::check(check, device, scratch.q, cache, batch, shape, scratch.attended)?;
        check.is(layer.input_norm, DType::Bf16, &[hidden])?;
        check.is(layer.post_norm, DType::Bf16, &[hidden])?;
        check.is(layer.qkv, DType::Bf16, &[shape.qkv_width(), hidden])?;
        check.is(layer.o, DType::Bf16, &[hidden, shape.q_width()])?;
        check.is(layer.gate_up, DType::Bf16, &[2 * width, hidden])?;
        check.is(layer.down, DType::Bf16, &[hidden, width])?;
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
    let mut flops = 4 * (rows * hidden) as u64;
    for layer in &model.layers {
        let matrices = [layer.qkv, layer.o, layer.gate_up, layer.down];
        let weights: usize = matrices.iter().map(|w| w.elements()).sum();
        elements += weights + 2 * hidden + 2 * shape.head_dim + (batch.cached as usize + rows) * token;
        flops += (2 * rows * weights + rotated + 5 * rows * width + 10 * rows * hidden) as u64;
        flops += attention::flops(batch, shape);
        let (cache, norms) = (&layer.cache, layer.head_norms);
        reads.extend([layer.input_norm, layer.qkv, norms.0, norms.1, cache.0, cache.1]);
        reads.extend([layer.o, layer.post_norm, layer.gate_up, layer.down]);
        writes.extend([&*cache.0, &*cache.1]);
    }
    let bytes = (elements * DType::Bf16.size()) as u64;
    OpRecord::new("decode_layers", kernel, &reads, &writes, flops).with_bytes(bytes)
}
