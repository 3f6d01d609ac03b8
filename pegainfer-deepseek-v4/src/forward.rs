//! One rank's pass over a step: from token ids to the logits of the sampled tokens.

mod attention;
mod draft;
mod dspark;
mod head;

pub(crate) use dspark::MarkovHead;
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
    /// See [`StepBounds::shared_scores`](crate::bounds::StepBounds).
    pub shared_scores: usize,
}

impl Pass<'_> {
    /// From token ids to `last_normed`, with the state of the layers, and that of the layers that draft. Nothing in it waits for the device
    /// or depends on more of the step than its shape.
    pub fn run(&mut self, state: &mut [LayerState], drafts: &mut [LayerState]) -> Result<(), OpError> {
        self.embed()?;
        ops::expand_streams(self.exec, &self.work.embedded, &mut self.work.streams)?;
        let weights = self.weights;
        for (i, (layer, state)) in weights.layers.iter().zip(&mut *state).enumerate() {
            self.enter_layer(layer, i == 0)?;
            if let Some(before) = i.checked_sub(1) {
                self.keep_target(before)?;
            }
            self.layer(layer, self.config.layers[i], state)?;
        }
        self.leave()?;
        self.keep_target(weights.layers.len() - 1)?;
        self.fill_rings(drafts)?;
        self.sampled_rows(&weights.head_hyper, &weights.norm)
    }

    /// Enters a layer's attention: the streams are then those behind the layer before. `first`: there is none before this layer.
    fn enter_layer(&mut self, layer: &Layer, first: bool) -> Result<(), OpError> {
        match first {
            true => self.enter_first(&layer.attn_hyper, &layer.attn_norm),
            false => self.enter(&layer.attn_hyper, &layer.attn_norm),
        }
    }

    /// Runs a layer that was entered up to the output of its experts, which [`enter`](Self::enter) or [`leave`](Self::leave) adds to the
    /// streams.
    fn layer(&mut self, layer: &Layer, kind: LayerKind, state: &mut LayerState) -> Result<(), OpError> {
        self.attention(&layer.attn, kind, state)?;
        self.enter(&layer.ffn_hyper, &layer.ffn_norm)?;
        self.experts(&layer.moe)
    }

    /// True when there are other ranks to talk to.
    fn is_shared(&self) -> bool {
        self.shard.ranks > 1
    }

    /// Looks up the token ids: writes `embedded`.
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
        Ok(())
    }

    fn hyper_spec(&self) -> HyperSpec {
        let c = self.config;
        HyperSpec { iters: c.sinkhorn_iters, eps: c.hc_eps, norm_eps: c.rms_norm_eps }
    }

    /// Mixes the streams to the input of the first block and normalises it: writes `normed`.
    fn enter_first(&mut self, hyper: &HyperWeights, norm: &Tensor) -> Result<(), OpError> {
        let (spec, eps) = (self.hyper_spec(), self.config.rms_norm_eps);
        let Self { exec, work, .. } = self;
        ops::hyper_mix(exec, &work.streams, hyper, spec, &mut work.mixed, (&mut work.post, &mut work.comb))?;
        work.normed.norm(exec, &work.mixed, norm, eps)
    }

    /// Adds the output of the block before to the streams, mixes them to the input of the next block and normalises it: writes `normed`.
    fn enter(&mut self, hyper: &HyperWeights, norm: &Tensor) -> Result<(), OpError> {
        let (spec, eps, shared) = (self.hyper_spec(), self.config.rms_norm_eps, self.is_shared());
        let Self { exec, work, .. } = self;
        let Workspace { output, partial, streams, post, comb, mixed, normed, .. } = &mut **work;
        let f = if shared { partial } else { output };
        let (hyper, norm) = ((hyper, spec), (norm, eps));
        ops::hyper_merge_mix_norm(exec, (f, streams), hyper, (post, comb), norm, mixed, normed.outputs())
    }

    /// Adds the output of the last block to the streams.
    fn leave(&mut self) -> Result<(), OpError> {
        let shared = self.is_shared();
        let Self { exec, work, .. } = self;
        let f = if shared { &work.partial } else { &work.output };
        ops::hyper_merge(exec, f, (&work.post, &work.comb), &mut work.streams)
    }

    /// Runs `normed` through the experts of all ranks: writes `output`, or `partial` if there are several ranks.
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
        ops::moe(exec, x, choice, experts, math, &mut work.shared, out)?;
        if !shared {
            return Ok(());
        }
        self.communicator.all_reduce(exec, &mut work.partial)
    }
}
