//! One rank's forward pass over a step: from token ids to the logits of the sampled tokens.

mod attention;
mod draft;
mod dspark;
mod head;

pub(crate) use dspark::add_transition;

use crate::config::{Config, LayerKind};
use crate::inputs::Inputs;
use crate::numerics::Numerics;
use crate::plan::Step;
use crate::rank_config::{DeepSeekV4, RankConfig};
use crate::rotations::Rotations;
use crate::shard::{OwnTokens, RankParts};
use crate::sharing::Sharing;
use crate::state::{Cache, LayerState};
use crate::weights::{self, Layer, Router, Weights};
use crate::workspace::Workspace;
use pegainfer_core::exec::Exec;
use pegainfer_core::parallel::{Communicator, Shard};
use pegainfer_core::tensor::{OpError, Tensor};
use pegainfer_kernels::ops::deepseek_v4::{
    self as ops, ExpertMath, HyperSpec, HyperWeights, Moe, Routing, RoutingSpec,
};
use pegainfer_runtime::is_prompt_step;

/// The borrowed parts of one run.
pub(crate) struct Pass<'a> {
    pub exec: &'a mut Exec,
    pub config: &'a Config,
    pub numerics: Numerics,
    pub shard: Shard,
    pub weights: &'a Weights,
    pub rotations: &'a Rotations,
    pub inputs: Inputs<'a>,
    pub work: &'a mut Workspace,
    pub step: &'a Step,
    /// Tokens drawn by the previous step, `[samples]` u32.
    pub previous: &'a Tensor,
    /// The other ranks, if there are any.
    pub communicator: Option<&'a dyn Communicator>,
    /// Work shared between ranks; see [`Options`](crate::rank_config::Options).
    pub sharing: Sharing,
}

impl<'a> Pass<'a> {
    /// The parts of a pass of the runtime, the state of the layers that run, and that of the layers that draft.
    pub fn of(
        pass: &'a mut pegainfer_runtime::Pass<'_, DeepSeekV4>,
    ) -> (Self, &'a mut [LayerState], &'a mut [LayerState]) {
        let pegainfer_runtime::Pass {
            exec, config, weights, cache, work, inputs, previous, step, communicator, ..
        } = pass;
        let RankConfig { model: config, options, shard, layers: ran } = *config;
        let Cache { layers, slots, rotations, .. } = &mut **cache;
        let (state, drafts) = layers.split_at_mut(config.layers.len());
        let pass = Self {
            exec,
            config,
            numerics: options.numerics,
            shard: *shard,
            weights,
            rotations,
            inputs: Inputs { common: inputs, slots },
            work,
            step,
            previous,
            communicator: *communicator,
            sharing: options.sharing,
        };
        (pass, &mut state[..*ran], drafts)
    }
}

impl Pass<'_> {
    /// Runs the model from token ids to `last_normed`, with the state of the layers and of the layers that draft. Never
    /// waits for the device, and depends only on the shape of the step.
    pub fn run(&mut self, state: &mut [LayerState], drafts: &mut [LayerState]) -> Result<(), OpError> {
        self.embed()?;
        ops::expand_streams(self.exec, &self.work.embedded, &mut self.work.streams)?;
        let weights = self.weights;
        for (i, (layer, state)) in weights.layers.iter().zip(&mut *state).enumerate() {
            self.enter_layer(layer, i == 0)?;
            if let Some(before) = i.checked_sub(1) {
                self.keep_target(before)?;
            }
            self.layer(layer, (i, self.config.layers[i]), state)?;
        }
        self.leave()?;
        self.keep_target(weights.layers.len() - 1)?;
        self.fill_rings(drafts)?;
        self.sampled_rows(&weights.head_hyper, &weights.norm)
    }

    /// Enters a layer's attention: the streams are then those after the previous layer. `first`: this is the first
    /// layer.
    fn enter_layer(&mut self, layer: &Layer, first: bool) -> Result<(), OpError> {
        match first {
            true => self.enter_first(&layer.attn_hyper, &layer.attn_norm),
            false => self.enter(&layer.attn_hyper, &layer.attn_norm),
        }
    }

    /// Runs an entered layer, number `i` of the model, up to the output of its experts, which [`enter`](Self::enter) or [`leave`](Self::leave)
    /// adds to the streams.
    fn layer(&mut self, layer: &Layer, (i, kind): (usize, LayerKind), state: &mut LayerState) -> Result<(), OpError> {
        self.attention(&layer.attn, kind, state)?;
        self.enter(&layer.ffn_hyper, &layer.ffn_norm)?;
        self.experts(&layer.moe, i)
    }

    /// True if there are other ranks.
    fn is_shared(&self) -> bool {
        self.communicator.is_some()
    }

    /// Looks up the token ids: writes `embedded`.
    fn embed(&mut self) -> Result<(), OpError> {
        let first = self.shard.vocab(self.config).start;
        let Self { exec, weights, inputs, work, previous, communicator, .. } = self;
        ops::resolve_ids(exec, previous, &mut inputs.common.tokens)?;
        ops::embed(exec, &inputs.common.tokens, &weights.embedding, first, &mut work.embedded)?;
        // Exact: all but one of the ranks add zeros.
        communicator.map_or(Ok(()), |all| all.all_reduce(exec, &mut work.embedded))
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

    /// This rank's tokens if each rank has the residual streams of some of them; `None` if it has those of all. From
    /// the end of the first block to that of the last, `streams`, `post`, `comb` and `mixed` then hold only its own
    /// tokens. So does `output` once it is summed, and `normed` until
    /// [`Normed::gather`](crate::normed::Normed::gather).
    fn shared_tokens(&self) -> Option<OwnTokens> {
        let (tokens, shared) = (self.step.tokens.len(), self.is_shared() && is_prompt_step(self.step));
        (shared && tokens >= self.sharing.tokens).then(|| self.shard.tokens(tokens))
    }

    /// Sums `output` over the ranks: the rows of this rank's tokens, or all rows if it has all tokens. No effect with
    /// one rank.
    fn sum_over_ranks(&mut self) -> Result<(), OpError> {
        let (share, tokens) = (self.shared_tokens(), self.step.tokens.len());
        let Self { exec, work, communicator: Some(communicator), .. } = self else { return Ok(()) };
        match share {
            None => communicator.all_reduce(exec, &mut work.output),
            Some(share) => {
                work.output.set_rows(share.rows);
                let summed = communicator.reduce_scatter(exec, &mut work.output);
                work.output.set_rows(tokens);
                summed
            }
        }
    }

    /// Adds the output of the block before to the streams, mixes them to the input of the next block and normalises it:
    /// writes `normed`.
    fn enter(&mut self, hyper: &HyperWeights, norm: &Tensor) -> Result<(), OpError> {
        let (spec, eps) = (self.hyper_spec(), self.config.rms_norm_eps);
        let (share, tokens) = (self.shared_tokens(), self.step.tokens.len());
        let Self { exec, work, .. } = self;
        let (hyper, norm) = ((hyper, spec), (norm, eps));
        let Some(OwnTokens { own, .. }) = share else {
            let Workspace { output, streams, post, comb, mixed, normed, .. } = &mut **work;
            return ops::hyper_merge_mix_norm(
                exec,
                (output, streams),
                hyper,
                (post, comb),
                norm,
                mixed,
                normed.outputs(),
            );
        };
        work.set_residual_range(own.clone());
        let Workspace { output, streams, post, comb, mixed, normed, .. } = &mut **work;
        let written = normed.write_own(own, |outputs| {
            ops::hyper_merge_mix_norm(exec, (output, streams), hyper, (post, comb), norm, mixed, outputs)
        });
        work.set_residual_range(0..tokens);
        written
    }

    /// Adds the output of the last block to the streams, which are then those of all tokens.
    fn leave(&mut self) -> Result<(), OpError> {
        let (share, tokens) = (self.shared_tokens(), self.step.tokens.len());
        let Self { exec, work, .. } = self;
        let Some(OwnTokens { own, .. }) = share else {
            return ops::hyper_merge(exec, &work.output, (&work.post, &work.comb), &mut work.streams);
        };
        work.set_residual_range(own);
        let merged = ops::hyper_merge(exec, &work.output, (&work.post, &work.comb), &mut work.streams);
        work.set_residual_range(0..tokens);
        merged.and_then(|()| self.gather_streams())
    }

    /// Gathers the residual streams of the other ranks' tokens.
    fn gather_streams(&mut self) -> Result<(), OpError> {
        let (Some(share), tokens) = (self.shared_tokens(), self.step.tokens.len()) else { return Ok(()) };
        let Self { exec, work, communicator: Some(communicator), .. } = self else { return Ok(()) };
        work.streams.set_rows(share.rows);
        let gathered = communicator.all_gather_rows(exec, &mut work.streams);
        work.streams.set_rows(tokens);
        gathered
    }

    /// Number under which layers that draft leave their choice of experts: that of the last layer, which is not counted.
    fn draft_number(&self) -> usize {
        self.config.layers.len() - 1
    }

    /// Runs `normed` through the experts of all ranks, chosen in layer number `i`: writes `output`.
    fn experts(&mut self, moe: &weights::Moe, i: usize) -> Result<(), OpError> {
        let share = self.shared_tokens();
        let Self { exec, config, numerics, shard, inputs, work, communicator, .. } = self;
        let math = ExpertMath { limit: config.swiglu_limit, quantize: numerics.quantize_activations };
        let owns_shared = shard.owns_shared_expert(config);
        let experts = Moe { routed: &moe.experts, first: moe.first, shared: owns_shared.then_some(&moe.shared) };
        if let (Some(share), Some(communicator)) = (share, *communicator)
            && work.normed.is_own()
        {
            // All ranks exchange the same data, including those without the shared expert.
            let all = Moe { shared: Some(&moe.shared), ..experts };
            let rounds = ops::moe_rounds(exec, &work.normed.exact, all, math, &work.shared)?;
            work.normed.gather(exec, communicator, share.rows, rounds)?;
        }
        let x = work.normed.input(&moe.experts.gate);
        ops::begin_moe(exec, x, config.experts_per_token, experts, math, &mut work.shared)?;
        ops::matmul(exec, &work.normed.exact, &moe.gate, &mut work.router_logits)?;
        let routing = match &moe.router {
            Router::Hash(table) => Routing::Hash { table, ids: &inputs.common.tokens },
            Router::Learned(bias) => Routing::Learned { bias },
        };
        let spec = RoutingSpec { scale: config.routed_scaling };
        let chosen = work.experts.of_layer(i, work.router_logits.rows_cols().0);
        ops::route(exec, &work.router_logits, routing, spec, (&mut *chosen, &mut work.expert_weights))?;
        let choice = (&*chosen, &work.expert_weights);
        ops::moe(exec, x, choice, experts, math, &work.shared, &mut work.output)?;
        self.sum_over_ranks()
    }
}
