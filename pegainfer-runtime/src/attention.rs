//! Layers of full attention over the paged KV cache: fused projection, norms of queries and keys, rotary positions,
//! attention, and an optional gate on its output.

use super::decoder::DecoderShape;
use super::decoder_workspace::{AttentionScratch, DecoderWorkspace};
use super::inputs::Inputs;
use super::lora::{Adapters, Projection, adapted_linear};
use super::projection_source::ProjectionSource;
use super::quantization::{Quantization, load_projection};
use super::sampled_rows::SampledRows;
use pegainfer_core::exec::Exec;
use pegainfer_core::schedule::Step;
use pegainfer_core::tensor::{OpError, Tensor};
use pegainfer_core::weights::{Columns, Loader, SourceTensor, WeightsError};
use pegainfer_kernels::ops::{self, AttentionBatch, Matrix};
use pegainfer_kernels::ops::{HeadShape, Heads, KvDType};
use std::ops::Range;

/// Weights of a layer of full attention.
#[derive(Debug)]
pub struct Attention {
    /// Queries, keys, values: `[(heads + 2 kv_heads) * head_dim, hidden]`. With gates: query and gate of each head
    /// alternating, then keys, values: `[(2 heads + 2 kv_heads) * head_dim, hidden]`.
    pub qkv: Matrix,
    /// `[head_dim]`.
    pub q_norm: Tensor,
    /// `[head_dim]`.
    pub k_norm: Tensor,
    /// `[hidden, heads * head_dim]`.
    pub o: Matrix,
    shape: DecoderShape,
}

impl Attention {
    /// Loads `self_attn.*` of the layer with this tensor name `prefix`. `norm` loads the weight of a norm by name and
    /// length.
    pub fn load(
        loader: &mut Loader<'_>,
        prefix: &str,
        shape: DecoderShape,
        quantization: Option<&Quantization>,
        norm: impl Fn(&mut Loader<'_>, String, usize) -> Result<Tensor, WeightsError>,
    ) -> Result<Self, WeightsError> {
        let name = |tail: &str| format!("{prefix}.self_attn.{tail}.weight");
        let width = shape.heads.head_dim;
        let [qkv, o] = Self::sources(prefix, &shape);
        let title = &o.parts[0].name;
        Ok(Self {
            qkv: load_projection(loader, quantization, &name("qkv_proj"), &qkv.parts, qkv.columns)?,
            q_norm: norm(loader, name("q_norm"), width)?,
            k_norm: norm(loader, name("k_norm"), width)?,
            o: load_projection(loader, quantization, title, &o.parts, o.columns.clone())?,
            shape,
        })
    }

    /// Where the rows of `qkv` and `o` are in the checkpoint, for the layer with this tensor name `prefix`.
    pub fn sources(prefix: &str, shape: &DecoderShape) -> [ProjectionSource; 2] {
        let DecoderShape { hidden, heads, all_heads, gated, shard, .. } = *shape;
        let name = |tail: &str| format!("{prefix}.self_attn.{tail}.weight");
        let rows = |tail: &str, heads: usize, held: Range<usize>, width: usize| SourceTensor {
            name: name(tail),
            rows: heads * width,
            part: held.start * width..held.end * width,
        };
        let (q, kv, width) = (all_heads.heads, all_heads.kv_heads, heads.head_dim);
        let qkv = vec![
            rows("q_proj", q, shard.part(q), if gated { 2 * width } else { width }),
            rows("k_proj", kv, shard.part_or_copy(kv), width),
            rows("v_proj", kv, shard.part_or_copy(kv), width),
        ];
        let out = vec![SourceTensor::whole(name("o_proj"), hidden)];
        let columns = Columns { stored: all_heads.q_width(), part: shard.part(all_heads.q_width()) };
        [ProjectionSource { parts: qkv, columns: hidden.into() }, ProjectionSource { parts: out, columns }]
    }

    /// Weights of the norms of queries and of keys.
    pub fn norms(&self) -> (&Tensor, &Tensor) {
        (&self.q_norm, &self.k_norm)
    }

    /// Runs the layer up to its output projection, from `normed` to `attended`, for `rows` of the step that `inputs`
    /// was filled with. Keys and values of all tokens are written to `kv`.
    pub fn forward<R: Clone + Default>(
        &self,
        exec: &mut Exec,
        work: &mut DecoderWorkspace,
        kv: &mut KvLayer,
        (inputs, step): (&Inputs, &Step<R>),
        rows: SampledRows,
        mut adapters: Option<&mut Adapters<'_>>,
    ) -> Result<(), OpError> {
        // Adapters read what the output projection reads, in bf16.
        let next = adapters.is_none().then_some(&self.o);
        match rows {
            SampledRows::All => self.attend_all(exec, work, kv, (inputs, step), next, adapters),
            SampledRows::None => self.project(exec, work, kv, inputs, adapters),
            SampledRows::RowEnds => {
                self.project(exec, work, kv, inputs, adapters.as_deref_mut())?;
                work.gather_queries(exec, &inputs.sample_rows)?;
                adapters.into_iter().for_each(Adapters::gather);
                self.attend(exec, &mut work.attention, kv, &inputs.sampled_attention(step), next)
            }
            SampledRows::Some => {
                self.attend_all(exec, work, kv, (inputs, step), None, adapters.as_deref_mut())?;
                adapters.into_iter().for_each(Adapters::gather);
                work.gather_outputs(exec, &inputs.sample_rows)
            }
        }
    }

    /// `normed` becomes `attended` for every token, as input of `next`. Rows with one token each take a fused op.
    fn attend_all<R: Clone + Default>(
        &self,
        exec: &mut Exec,
        work: &mut DecoderWorkspace,
        kv: &mut KvLayer,
        (inputs, step): (&Inputs, &Step<R>),
        next: Option<&Matrix>,
        adapters: Option<&mut Adapters<'_>>,
    ) -> Result<(), OpError> {
        let batch = inputs.attention(step);
        if step.queries().1 > 1 {
            self.project(exec, work, kv, inputs, adapters)?;
            return self.attend(exec, &mut work.attention, kv, &batch, next);
        }
        let AttentionScratch { rope, qkv, q, attended, .. } = &mut work.attention;
        let (heads, out) = (self.heads(rope, inputs), attended.input_of(next));
        adapted_linear(exec, (&work.activations.normed, &self.qkv), Projection::Input, adapters, qkv)?;
        match self.shape.gated {
            true => ops::gated_decode_attention(exec, qkv, &heads, &batch, kv.both_mut(), q, out),
            false => ops::decode_attention(exec, qkv, &heads, &batch, kv.both_mut(), q, out),
        }
    }

    /// `normed` becomes `q`, keys and values in the cache and, in `qkv`, the gates.
    fn project(
        &self,
        exec: &mut Exec,
        work: &mut DecoderWorkspace,
        kv: &mut KvLayer,
        inputs: &Inputs,
        adapters: Option<&mut Adapters<'_>>,
    ) -> Result<(), OpError> {
        let AttentionScratch { rope, qkv, q, .. } = &mut work.attention;
        let heads = self.heads(rope, inputs);
        adapted_linear(exec, (&work.activations.normed, &self.qkv), Projection::Input, adapters, qkv)?;
        match self.shape.gated {
            true => ops::gated_qk_norm_rope_write_kv(exec, qkv, &heads, q, kv.both_mut()),
            false => ops::qk_norm_rope_write_kv(exec, qkv, &heads, q, kv.both_mut()),
        }
    }

    /// `q` becomes `attended`, as input of `next`: attention of the queries of `batch` over the cache.
    fn attend(
        &self,
        exec: &mut Exec,
        work: &mut AttentionScratch,
        kv: &KvLayer,
        batch: &AttentionBatch<'_>,
        next: Option<&Matrix>,
    ) -> Result<(), OpError> {
        let AttentionScratch { qkv, q, attended, .. } = work;
        let (shape, cache) = (self.shape.heads, (&kv.k, &kv.v));
        let scale = (shape.head_dim as f32).sqrt().recip();
        if !self.shape.gated {
            return ops::attention(exec, q, cache, batch, shape, scale, attended.input_of(next));
        }
        ops::attention(exec, q, cache, batch, shape, scale, attended.bf16())?;
        ops::attention_gate(exec, qkv, shape, attended.bf16())
    }

    /// The heads of the layer, for the tokens of a step.
    fn heads<'a>(&'a self, rope: &'a Tensor, inputs: &'a Inputs) -> Heads<'a> {
        let (shape, norms, eps) = (self.shape.heads, self.norms(), self.shape.eps);
        Heads { shape, norms, eps, rope, positions: inputs.rope_positions(), slots: &inputs.slots }
    }
}

/// The paged cache of one layer of full attention; see [`HeadShape::cache`] for the layout.
#[derive(Debug)]
pub struct KvLayer {
    /// Keys.
    pub k: Tensor,
    /// Values.
    pub v: Tensor,
}

impl KvLayer {
    /// A cache of `blocks` blocks. On the CPU, pages take memory when they are first written.
    pub fn new(exec: &mut Exec, shape: HeadShape, dtype: KvDType, blocks: usize) -> std::io::Result<Self> {
        let [k, v] = shape.cache(exec.device(), dtype, blocks);
        Ok(Self { k: exec.tensor("kv.k", &k, dtype.dtype())?, v: exec.tensor("kv.v", &v, dtype.dtype())? })
    }

    /// Keys and values, to be written.
    pub fn both_mut(&mut self) -> (&mut Tensor, &mut Tensor) {
        (&mut self.k, &mut self.v)
    }
}
