//! Weights of a gated delta rule layer.

use crate::config::Config;
use pegainfer_core::tensor::Tensor;
use pegainfer_core::weights::{Columns, Loader, SourceTensor, WeightsError};
use pegainfer_kernels::ops::{DeltaShape, Matrix};
use pegainfer_runtime::{ProjectionSource, load_projection};
use std::ops::Range;

/// Weights of a gated delta rule layer; shapes are those of `DeltaShape`.
#[derive(Debug)]
pub struct LinearAttention {
    /// q, k, v, z, b, a: `[projected_width, hidden]`.
    pub projection: Matrix,
    /// `[conv_width, channels]` f32.
    pub conv: Tensor,
    /// `[value_heads]` f32.
    pub a_log: Tensor,
    /// `[value_heads]` f32.
    pub dt_bias: Tensor,
    /// `[value_dim]` f32.
    pub norm: Tensor,
    /// `[hidden, v_width]`.
    pub out: Matrix,
}

/// The heads of a layer that a rank holds, and where the checkpoint has them.
///
/// A checkpoint stores the value heads of a key head together. A GGUF file stores them
/// [tiled](pegainfer_kernels::ops::DeltaShape::output_head); their rows and channels are loaded in the order of other
/// checkpoints, so only the output projection has the file's order: of its columns, a rank has the same part of each
/// tile, which are the tiles of the rank's own heads.
struct Held<'a> {
    config: &'a Config,
    /// Columns of q, and of k, of the whole model.
    k: usize,
    /// Columns of v of the whole model.
    v: usize,
    /// Value heads of the whole model.
    heads: usize,
}

impl<'a> Held<'a> {
    /// Those of the rank with these numbers.
    fn of(config: &'a Config) -> Self {
        let (shape, ranks) = (config.delta, config.shard.ranks);
        Self { config, k: shape.k_width() * ranks, v: shape.v_width() * ranks, heads: shape.value_heads * ranks }
    }

    /// Rows or channels of q, k and v of the whole model.
    fn channels(&self) -> usize {
        2 * self.k + self.v
    }

    /// Ranges of the rank's value heads, each `width` wide, after the first `first`.
    fn values(&self, first: usize, width: usize) -> Vec<Range<usize>> {
        let shape = self.config.delta;
        let held = self.config.shard.part(self.heads);
        if shape.tiled_output {
            let all = DeltaShape { key_heads: self.heads / shape.group(), value_heads: self.heads, ..shape };
            let start = |h: usize| first + all.output_head(h) * width;
            return held.map(|h| start(h)..start(h) + width).collect();
        }
        std::iter::once(first + held.start * width..first + held.end * width).collect()
    }

    /// Ranges of the rank's queries, keys and values.
    fn qkv(&self) -> Vec<Range<usize>> {
        let keys = self.config.shard.part(self.k);
        let after = |first: usize| first + keys.start..first + keys.end;
        let values = self.values(2 * self.k, self.config.delta.value_dim);
        // One part if the rank holds all rows in their order.
        match self.config.shard.ranks {
            1 if values.len() == 1 => std::iter::once(0..self.channels()).collect(),
            _ => [keys.clone(), after(self.k)].into_iter().chain(values).collect(),
        }
    }
}

impl LinearAttention {
    /// Loads `linear_attn.*` of the layer with this tensor name `prefix`.
    pub(super) fn load(loader: &mut Loader<'_>, config: &Config, prefix: &str) -> Result<Self, WeightsError> {
        let (quantization, shape) = (config.quantization.as_ref(), config.delta);
        let (name, held) = (|tail: &str| format!("{prefix}.linear_attn.{tail}"), Held::of(config));
        let [input, out] = Self::sources(config, prefix);
        let decay = if config.gguf { (-std::f32::consts::E, decay_logarithm as fn(f32) -> f32) } else { AS_STORED };
        Ok(Self {
            projection: load_projection(loader, quantization, &name("in_proj.weight"), &input.parts, input.columns)?,
            conv: conv(loader, name("conv1d.weight"), &held)?,
            a_log: of_heads(loader, name("A_log"), &held, decay)?,
            dt_bias: of_heads(loader, name("dt_bias"), &held, AS_STORED)?,
            norm: loader.converted(name("norm.weight"), &[shape.value_dim], 1.0, &[shape.value_dim], |w| w)?,
            out: load_projection(loader, quantization, &out.parts[0].name, &out.parts, out.columns.clone())?,
        })
    }

    /// Where the rows of `projection` and `out` are in the checkpoint, for the layer with this tensor name `prefix`.
    pub(super) fn sources(config: &Config, prefix: &str) -> [ProjectionSource; 2] {
        let (hidden, shape, held) = (config.hidden_size, config.delta, Held::of(config));
        let name = |tail: &str| format!("{prefix}.linear_attn.{tail}.weight");
        let rows = |tail: &str, rows: usize, parts: Vec<Range<usize>>| {
            let name = name(tail);
            parts.into_iter().map(move |part| SourceTensor { name: name.clone(), rows, part })
        };
        let zeros = (shape.padding() > 0).then(|| SourceTensor::zeros(shape.padding()));
        let parts = rows("in_proj_qkv", held.channels(), held.qkv())
            .chain(rows("in_proj_z", held.v, held.values(0, shape.value_dim)))
            .chain(rows("in_proj_b", held.heads, held.values(0, 1)))
            .chain(rows("in_proj_a", held.heads, held.values(0, 1)))
            .chain(zeros);
        let out = vec![SourceTensor::whole(name("out_proj"), hidden)];
        let columns = Columns { stored: held.v, part: config.shard.part(held.v) };
        [ProjectionSource { parts: parts.collect(), columns: hidden.into() }, ProjectionSource { parts: out, columns }]
    }
}

/// A dummy weight, which becomes 1, and no conversion.
const AS_STORED: (f32, fn(f32) -> f32) = (1.0, |value| value);

/// Loads a vector with an element for each value head, in f32. Stored elements, or `dummy`, are converted.
fn of_heads(
    loader: &mut Loader<'_>,
    name: String,
    held: &Held<'_>,
    (dummy, convert): (f32, fn(f32) -> f32),
) -> Result<Tensor, WeightsError> {
    let parts = held.values(0, 1);
    loader.converted(name, &[held.heads], dummy, &[held.config.delta.value_heads], |values| {
        parts.into_iter().flatten().map(|i| convert(values[i])).collect()
    })
}

/// The logarithm of a decay rate that is stored as `-exp(A_log)`.
fn decay_logarithm(rate: f32) -> f32 {
    f64::from(-rate).ln() as f32
}

/// Loads the convolution, `[conv_width, channels]`. It is stored by channel; the kernels read neighbouring channels of
/// one of the `conv_width` inputs at once.
fn conv(loader: &mut Loader<'_>, name: String, held: &Held<'_>) -> Result<Tensor, WeightsError> {
    let (shape, channels) = (held.config.delta, held.qkv());
    let width = shape.conv_width;
    let transpose = |w: Vec<f32>| {
        let channels = || channels.iter().cloned().flatten();
        let places = (0..width).flat_map(|at| channels().map(move |channel| channel * width + at));
        places.map(|place| w[place]).collect()
    };
    let (from, to) = ([held.channels(), 1, width], [width, shape.channels()]);
    loader.converted(name, &from, 1.0 / width as f32, &to, transpose)
}
