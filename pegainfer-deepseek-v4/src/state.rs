//! Device state of a request between steps. Two kinds of memory:
//!
//! - A slot, of fixed size: the keys of the last 128 tokens, and for each compressor the tokens of incomplete entries.
//!   Everything in it is found by position (`p % ring`), so a slot needs no clearing for its next sequence. If steps
//!   verify drafts, rings are longer by the maximum number of drafts, so that a refused draft overwrites nothing that
//!   is needed.
//! - Pages, which grow with the context: the compressed entries of 128 tokens each, of all layers.
//!
//! At a multiple of 128 tokens, a slot and the pages before it are all that a sequence needs to continue. A copy of the
//! slot is the snapshot that the prefix cache keeps in addition to the pages.

use crate::bounds::StepBounds;
use crate::config::{Config, LayerKind, WINDOW};
use crate::numerics::Numerics;
use crate::plan::{NO_STATE, PAGE_TOKENS, Step};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops::deepseek_v4::{self as ops, CompressorSpec, CompressorState, RingTable};

/// Entries of one compressor, and its part of the slots.
#[derive(Debug)]
pub struct Compressed {
    /// `[pages, 128 / ratio, dim]`.
    pub entries: Tensor,
    /// State of incomplete entries.
    pub partial: CompressorState,
}

/// One layer's part of every slot and page.
#[derive(Debug)]
pub struct LayerState {
    /// Keys of the newest tokens, `[slots, 128 + drafts, head_dim]`.
    pub window: Tensor,
    /// State of sparse and heavy layers.
    pub compressed: Option<Compressed>,
    /// The indexer's, of sparse layers.
    pub index: Option<Compressed>,
}

/// The compressor of a layer of this kind, or of its indexer.
pub fn compressor_spec(config: &Config, kind: LayerKind, index: bool, numerics: Numerics) -> Option<CompressorSpec> {
    let ratio = kind.ratio().filter(|_| !index || kind == LayerKind::Sparse)?;
    Some(CompressorSpec { ratio, index, quantize: numerics.quantize_kv, eps: config.rms_norm_eps })
}

/// Allocates the state of every layer, followed by that of the layers that draft, if they are loaded. On the CPU, pages
/// take memory when they are first written.
pub fn allocate(
    exec: &mut Exec,
    config: &Config,
    numerics: Numerics,
    bounds: StepBounds,
) -> std::io::Result<Vec<LayerState>> {
    let StepBounds { slots, pages, drafts, .. } = bounds;
    let compressed = |exec: &mut Exec, spec: Option<CompressorSpec>, dim: usize| {
        let Some(spec) = spec else { return Ok(None) };
        let ring = [slots, spec.ring() + drafts, if spec.overlap() { 2 * dim } else { dim }];
        Ok::<_, std::io::Error>(Some(Compressed {
            entries: exec.tensor("entries", &[pages, PAGE_TOKENS / spec.ratio, dim], numerics.activations)?,
            partial: CompressorState {
                values: exec.tensor("partial.values", &ring, DType::F32)?,
                scores: exec.tensor("partial.scores", &ring, DType::F32)?,
            },
        }))
    };
    let layer = |kind: &LayerKind| {
        Ok(LayerState {
            window: exec.tensor("window", &[slots, WINDOW + drafts, config.head_dim], numerics.activations)?,
            compressed: compressed(exec, compressor_spec(config, *kind, false, numerics), config.head_dim)?,
            index: compressed(exec, compressor_spec(config, *kind, true, numerics), config.index_head_dim)?,
        })
    };
    kinds(config).map(layer).collect()
}

/// Kinds of the layers, followed by those of the layers that draft, if they are loaded.
fn kinds(config: &Config) -> impl Iterator<Item = &LayerKind> {
    config.layers.iter().chain(std::iter::repeat_n(&LayerKind::Window, config.loaded_draft_layers()))
}

/// Bytes of one page.
pub fn page_bytes(config: &Config, numerics: Numerics) -> usize {
    config.entry_bytes_per_token(numerics) * PAGE_TOKENS
}

/// Bytes of one slot if steps verify up to `drafts` draft tokens of a row.
pub fn slot_bytes(config: &Config, numerics: Numerics, drafts: usize) -> usize {
    let ring = |spec: Option<CompressorSpec>, dim: usize| {
        let width = |spec: CompressorSpec| if spec.overlap() { 2 * dim } else { dim };
        spec.map_or(0, |spec| 2 * 4 * (spec.ring() + drafts) * width(spec))
    };
    let layer = |kind: &LayerKind| {
        (WINDOW + drafts) * config.head_dim * numerics.activations.size()
            + ring(compressor_spec(config, *kind, false, numerics), config.head_dim)
            + ring(compressor_spec(config, *kind, true, numerics), config.index_head_dim)
    };
    kinds(config).map(layer).sum()
}

impl LayerState {
    /// The tensors with a part per slot.
    fn rings(&mut self) -> impl Iterator<Item = &mut Tensor> {
        let compressors = self.compressed.iter_mut().chain(&mut self.index);
        let partial = compressors.flat_map(|Compressed { partial, .. }| [&mut partial.values, &mut partial.scores]);
        std::iter::once(&mut self.window).chain(partial)
    }
}

/// Addresses of the rings of all layers, for [`copy_slots`].
pub fn ring_table(exec: &mut Exec, state: &mut [LayerState]) -> Result<RingTable, OpError> {
    let rings: Vec<&Tensor> = state.iter_mut().flat_map(LayerState::rings).map(|ring| &*ring).collect();
    RingTable::new(exec, &rings)
}

/// Copies the old slot of each row of a step that changes its slot.
pub fn copy_slots(exec: &mut Exec, state: &mut [LayerState], table: &RingTable, step: &Step) -> Result<(), OpError> {
    for segment in step.state.iter().filter(|segment| segment.from != NO_STATE && segment.from != segment.to) {
        let mut rings: Vec<&mut Tensor> = state.iter_mut().flat_map(LayerState::rings).collect();
        ops::copy_slots(exec, table, &mut rings, segment.from, segment.to)?;
    }
    Ok(())
}
