//! One rank's pass over a step: from token ids to the logits of the sampled tokens.

mod attention;
mod head;

pub(crate) use head::Head;

use crate::config::{Config, LayerKind};
use crate::inputs::Inputs;
use crate::numerics::Numerics;
use crate::plan::Step;
use crate::rotations::Rotations;
use crate::shard::Shard;
use crate::state::LayerState;
use crate::weights::{self, Layer, Router, Weights};
use crate::workspace::Workspace;
use pegainfer_core::exec::Exec;
use pegainfer_core::parallel::Communicator;
use pegainfer_core::tensor::{OpError, Tensor};
use pegainfer_kernels::ops::deepseek_v4::{
    self as ops, ExpertMath, HyperSpec, HyperWeights, Moe, Routing, RoutingSpec,
};

/// The borrowed parts of one run.
pub(crate) struct Pass<'a> {
    pub exec: &'a mut Exec,
    pub config: &'a Config,
    pub numerics: Numerics,
    pub shard: Shard,
    pub weights: &'a Weights,
    pub rotations: &'a Rotations,
    pub inputs: &'a mut Inputs,
    pub work: &'a mut Workspace,
    pub step: &'a Step,
    /// What the samples of the step before drew, `[samples]` u32.
    pub previous: &'a Tensor,
    pub communicator: &'a dyn Communicator,
}

impl Pass<'_> {
    /// From token ids to `last_normed`. Nothing in it waits for the device or depends on more of the step than its shape.
    pub fn run(&mut self, state: &mut [LayerState]) -> Result<(), OpError> {
        self.embed()?;
        let weights = self.weights;
        for (i, (layer, state)) in weights.layers.iter().zip(&mut *state).enumerate() {
            self.attention_half(layer, self.config.layers[i], state)?;
            self.expert_half(layer)?;
        }
        self.sampled_rows()
    }

    /// True when there are other ranks to talk to.
    fn is_shared(&self) -> bool {
        self.shard.ranks > 1
    }

    fn embed(&mut self) -> Result<(), OpError> {
        let first = self.shard.vocab(self.config).start;
        let shared = self.is_shared();
        let Self { exec, weights, inputs, work, previous, .. } = self;
        ops::resolve_ids(exec, previous, &mut inputs.common.tokens)?;
        ops::embed(exec, &inputs.common.tokens, &weights.embedding, first, &mut work.embedded)?;
        if shared {
            // Exact: all but one of the ranks add zeros.
            self.communicator.all_reduce(exec, &mut work.embedded)?;
        }
        ops::expand_streams(exec, &work.embedded, &mut work.streams)
    }

    fn hyper_spec(&self) -> HyperSpec {
        let c = self.config;
        HyperSpec { iters: c.sinkhorn_iters, eps: c.hc_eps, norm_eps: c.rms_norm_eps }
    }

    /// Streams to the normalised input of a block.
    fn enter(&mut self, hyper: &HyperWeights, norm: &Tensor) -> Result<(), OpError> {
        let (spec, eps) = (self.hyper_spec(), self.config.rms_norm_eps);
        let Self { exec, work, .. } = self;
        ops::hyper_mix(exec, &work.streams, hyper, spec, &mut work.mixed, (&mut work.post, &mut work.comb))?;
        work.normed.norm(exec, &work.mixed, norm, eps)
    }

    /// A block's output to the streams.
    fn leave(&mut self) -> Result<(), OpError> {
        let Self { exec, work, .. } = self;
        ops::hyper_merge(exec, &work.output, (&work.post, &work.comb), &mut work.streams)
    }

    fn attention_half(&mut self, layer: &Layer, kind: LayerKind, state: &mut LayerState) -> Result<(), OpError> {
        self.enter(&layer.attn_hyper, &layer.attn_norm)?;
        self.attention(&layer.attn, kind, state)?;
        self.leave()
    }

    fn expert_half(&mut self, layer: &Layer) -> Result<(), OpError> {
        self.enter(&layer.ffn_hyper, &layer.ffn_norm)?;
        self.experts(&layer.moe)?;
        self.leave()
    }

    /// `normed` to `output` through the experts of all ranks.
    fn experts(&mut self, moe: &weights::Moe) -> Result<(), OpError> {
        let shared = self.is_shared();
        let Self { exec, config, numerics, shard, inputs, work, .. } = self;
        ops::matmul(exec, &work.normed.exact, &moe.gate, &mut work.router_logits)?;
        let routing = match &moe.router {
            Router::Hash(table) => Routing::Hash { table, ids: &inputs.common.tokens },
            Router::Learned(bias) => Routing::Learned { bias },
        };
        let spec = RoutingSpec { scale: config.routed_scaling };
        ops::route(exec, &work.router_logits, routing, spec, (&mut work.experts, &mut work.expert_weights))?;
        let math = ExpertMath { limit: config.swiglu_limit, quantize: numerics.quantize_activations };
        let owns_shared = shard.owns_shared_expert(config);
        let experts = Moe { routed: &moe.experts, first: moe.first, shared: owns_shared.then_some(&moe.shared) };
        let (x, choice) = (work.normed.input(&moe.experts.gate), (&work.experts, &work.expert_weights));
        let out = if shared { &mut work.partial } else { &mut work.output };
        ops::moe(exec, x, choice, experts, math, &mut work.routed, out)?;
        if !shared {
            return Ok(());
        }
        self.communicator.all_reduce(exec, &mut work.partial)?;
        ops::store_sum(exec, &work.partial, &mut work.output)
    }
}
