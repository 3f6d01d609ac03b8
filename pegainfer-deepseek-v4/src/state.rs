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

use crate::config::{Config, LayerKind, WINDOW};
use crate::numerics::Numerics;
use crate::plan::{NO_STATE, PAGE_TOKENS, Step};
use crate::rank_config::RankConfig;
use crate::rotations::Rotations;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops::deepseek_v4::{self as ops, CompressorSpec, CompressorState, RingTable};
use pegainfer_runtime::{Bounds, KeptTensors, LoadError, hash_rows};

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

/// Device state that outlives a step, and constants of the model.
#[derive(Debug)]
pub struct Cache {
    /// State of each layer, followed by that of the layers that draft, if they are loaded.
    pub layers: Vec<LayerState>,
    /// Addresses of all state in slots.
    pub(crate) rings: RingTable,
    /// State slot of each row of the newest pass, `[rows]` u32.
    pub(crate) slots: Tensor,
    pub(crate) rotations: Rotations,
}

impl Cache {
    /// Allocates the state within `bounds`, with `pages` pages. On the CPU, pages take memory when they are first
    /// written.
    pub(crate) fn new(
        exec: &mut Exec,
        RankConfig { model, options, .. }: &RankConfig,
        bounds: &Bounds,
        pages: usize,
    ) -> Result<Self, LoadError> {
        let slots = exec.tensor("state_slots", &[bounds.size.rows], DType::U32)?;
        let rotations = Rotations::new(exec, model)?;
        let mut layers = allocate(exec, model, options.numerics, bounds, pages).map_err(LoadError::State)?;
        Ok(Self { rings: ring_table(exec, &mut layers)?, layers, slots, rotations })
    }

    /// Takes the slots of a step over.
    pub(crate) fn fill_slots(&mut self, exec: &mut Exec, step: &Step) -> Result<(), OpError> {
        let slots: Vec<u32> = step.state.iter().map(|segment| segment.to).collect();
        exec.fill_rows(&mut self.slots, &slots)
    }

    /// What a sequence continues from: pages, and slots.
    pub(crate) fn kept_tensors(&mut self) -> KeptTensors<'_> {
        let mut kept = KeptTensors::default();
        for LayerState { window, compressed, index } in &mut self.layers {
            kept.states.push(window);
            for Compressed { entries, partial } in compressed.iter_mut().chain(index) {
                kept.blocks.push(entries);
                kept.states.extend([&mut partial.values, &mut partial.scores]);
            }
        }
        kept
    }

    /// Keys of a slot of the layers that draft.
    pub(crate) fn draft_ring(&self) -> usize {
        self.layers.last().map_or(0, |layer| layer.window.shape()[1])
    }
}

/// Allocates the state of every layer, followed by that of the layers that draft, if they are loaded.
fn allocate(
    exec: &mut Exec,
    config: &Config,
    numerics: Numerics,
    bounds: &Bounds,
    pages: usize,
) -> std::io::Result<Vec<LayerState>> {
    let Bounds { slots, drafts, .. } = *bounds;
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
    // Layers that draft have only a window.
    let drafts = std::iter::repeat_n(&LayerKind::Window, config.loaded_draft_layers());
    config.layers.iter().chain(drafts).map(layer).collect()
}

impl LayerState {
    /// The tensors with a part per slot.
    fn rings(&mut self) -> impl Iterator<Item = &mut Tensor> {
        let compressors = self.compressed.iter_mut().chain(&mut self.index);
        let partial = compressors.flat_map(|Compressed { partial, .. }| [&mut partial.values, &mut partial.scores]);
        std::iter::once(&mut self.window).chain(partial)
    }

    /// Hash of the state that belongs to the rows of `step`: their slots, and their newest pages.
    pub(crate) fn hash(&self, exec: &Exec, step: &Step) -> Result<u64, OpError> {
        let mut hash = 0;
        let mut add = |tensor: &Tensor, row: u32| -> Result<(), OpError> {
            hash = hash_rows(exec, tensor, row as usize..row as usize + 1, hash)?;
            Ok(())
        };
        for (b, segment) in step.state.iter().enumerate().filter(|(_, segment)| segment.to != NO_STATE) {
            let newest = step.positions[segment.end as usize - 1] as usize / PAGE_TOKENS;
            let page = step.block_tables[b].at(newest);
            add(&self.window, segment.to)?;
            for compressed in self.compressed.iter().chain(&self.index) {
                add(&compressed.partial.values, segment.to)?;
                add(&compressed.partial.scores, segment.to)?;
                add(&compressed.entries, page)?;
            }
        }
        Ok(hash)
    }
}

/// Addresses of the rings of all layers, for [`copy_slots`].
fn ring_table(exec: &mut Exec, state: &mut [LayerState]) -> Result<RingTable, OpError> {
    let rings: Vec<&Tensor> = state.iter_mut().flat_map(LayerState::rings).map(|ring| &*ring).collect();
    RingTable::new(exec, &rings)
}

/// Copies the old slot of each row of a step that changes its slot.
pub(crate) fn copy_slots(
    exec: &mut Exec,
    state: &mut [LayerState],
    table: &RingTable,
    step: &Step,
) -> Result<(), OpError> {
    for segment in step.state.iter().filter(|segment| segment.from != NO_STATE && segment.from != segment.to) {
        let mut rings: Vec<&mut Tensor> = state.iter_mut().flat_map(LayerState::rings).collect();
        ops::copy_slots(exec, table, &mut rings, segment.from, segment.to)?;
    }
    Ok(())
}
