//! Steps of few rows with one token each: all layers as one op.

use crate::config::Config;
use crate::weights::{Layer, Weights};
use pegainfer_core::exec::Exec;
use pegainfer_core::schedule::Step;
use pegainfer_core::tensor::{OpError, Tensor};
use pegainfer_kernels::ops::{self, DECODE_LAYERS_ROWS, DecodeLayer, DecodeModel, DecodeScratch, DecodeState, KvDType};
use pegainfer_runtime::{Activations, AttentionScratch, DecoderWorkspace, Inputs, KvLayer, LoadError};

/// Device state that outlives a step.
#[derive(Debug)]
pub struct Cache {
    /// Keys and values of each layer.
    pub layers: Vec<KvLayer>,
    /// State of the op that runs all layers at once; `None` if the op does not support the GPU or the model's shape.
    decode: Option<DecodeState>,
}

impl Cache {
    pub(crate) fn new(
        exec: &mut Exec,
        config: &Config,
        weights: &Weights,
        rope: &Tensor,
        blocks: usize,
    ) -> Result<Self, LoadError> {
        let layer = |_| KvLayer::new(exec, config.shape, config.kv_dtype, blocks);
        let layers = (0..config.layers).map(layer).collect::<Result<_, _>>();
        let mut layers: Vec<KvLayer> = layers.map_err(LoadError::State)?;
        let decode = match config.kv_dtype {
            // The op's kernel runs through all layers without an exchange.
            _ if config.shard.ranks > 1 => None,
            KvDType::Bf16 => match decode_model(config, weights, &mut layers, rope) {
                Some(model) => DecodeState::new(exec, &model)?,
                None => None,
            },
            // The op's kernel reads a cache in bf16.
            KvDType::Fp8 => None,
        };
        Ok(Self { layers, decode })
    }
}

/// True if the op supports `step`.
pub(crate) fn supports(cache: &Cache, step: &Step) -> bool {
    let one_each = step.queries() == (1, 1) && step.samples_every_token();
    cache.decode.is_some() && step.rows.len() <= DECODE_LAYERS_ROWS && one_each
}

/// Runs all layers, from the residual stream after the embedding to its value normalised by the final norm.
pub(crate) fn run(
    exec: &mut Exec,
    (config, weights): (&Config, &Weights),
    cache: &mut Cache,
    work: &mut DecoderWorkspace,
    inputs: &Inputs,
    step: &Step,
) -> Result<(), OpError> {
    let Cache { layers, decode } = cache;
    let Activations { residual, normed, delta, mlp } = &mut work.activations;
    let AttentionScratch { rope, qkv, q, attended, .. } = &mut work.attention;
    let (attended, activated, gate_up) = (attended.bf16(), mlp.activated.bf16(), &mut mlp.gate_up);
    let Some(mut model) = decode_model(config, weights, layers, rope) else {
        return Err(OpError { op: "decode_layers", message: "a layer has experts".to_owned() });
    };
    let batch = inputs.attention(step);
    let mut scratch = DecodeScratch { delta, qkv, q, attended, gate_up, activated };
    let at = (&inputs.positions, &inputs.slots);
    ops::decode_layers(exec, &mut model, decode.as_mut(), at, &batch, &mut scratch, residual, normed.bf16())
}

/// The model in the form that the op takes; `None` if it has experts.
fn decode_model<'a>(
    config: &Config,
    weights: &'a Weights,
    kv: &'a mut [KvLayer],
    rope: &'a Tensor,
) -> Option<DecodeModel<'a>> {
    let layer = |(layer, kv): (&'a Layer, &'a mut KvLayer)| {
        let mlp = layer.mlp.dense()?;
        Some(DecodeLayer {
            input_norm: &layer.input_norm,
            qkv: layer.attention.qkv.as_ref(),
            head_norms: layer.attention.norms(),
            cache: kv.both_mut(),
            o: layer.attention.o.as_ref(),
            post_norm: &layer.mlp.norm,
            gate_up: mlp.gate_up.as_ref(),
            down: mlp.down.as_ref(),
        })
    };
    Some(DecodeModel {
        layers: weights.layers.iter().zip(kv).map(layer).collect::<Option<_>>()?,
        final_norm: &weights.norm,
        rope,
        shape: config.shape,
        eps: config.rms_norm_eps,
    })
}
