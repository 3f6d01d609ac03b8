//! What a model is for: text, vectors, or scores of pairs.

use anyhow::{Context, Result, bail};
use pegainfer_core::weights::Checkpoint as Weights;
use pegainfer_model_files::ModelFiles;
use pegainfer_models::args::TaskArg;
use pegainfer_text::Tokenizer;
use serde_json::Value;
use std::path::Path;

/// What a model is for.
#[derive(Debug)]
pub enum Task {
    /// Text.
    Generate,
    /// A vector for a text. The token is appended to texts, if the tokenizer does not end them itself.
    Embed {
        /// Token that ends a text.
        end: Option<u32>,
    },
    /// A score for a query and a document.
    Rerank(Reranker),
}

/// Rows of the output matrix of the answers of a reranker.
#[derive(Debug)]
pub struct Reranker {
    /// Row of "yes" minus row of "no", `[hidden]`.
    difference: Vec<f32>,
}

/// Names of the output matrix and of the embedding, which takes its place.
const MATRICES: [&str; 2] = ["lm_head.weight", "model.embed_tokens.weight"];

impl Task {
    /// The task of the checkpoint at `dir` with this tokenizer.
    pub fn load(dir: &Path, kind: TaskArg, tokenizer: &Tokenizer) -> Result<Self> {
        let pools = pools(dir)?;
        Ok(match kind {
            TaskArg::Generate => Self::Generate,
            TaskArg::Auto if !pools => Self::Generate,
            TaskArg::Auto | TaskArg::Embed => {
                if !pools {
                    log::warn!("the model was not trained for vectors: its checkpoint has no pooling (modules.json)");
                }
                Self::Embed { end: missing_end(dir, tokenizer)? }
            }
            TaskArg::Rerank => Self::Rerank(Reranker::load(dir, tokenizer)?),
        })
    }

    /// Name of the task, for `GET /v1/models`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Generate => "generate",
            Self::Embed { .. } => "embed",
            Self::Rerank(_) => "rerank",
        }
    }
}

/// True if sentence-transformers' files say that the last token's vector is that of the text.
fn pools(dir: &Path) -> Result<bool> {
    let files = ModelFiles::open(dir)?;
    let Some(text) = files.read("modules.json")? else { return Ok(false) };
    let modules: Value = serde_json::from_str(&text).context("modules.json is not valid JSON")?;
    let is_pooling = |module: &&Value| module["type"].as_str().is_some_and(|name| name.ends_with("Pooling"));
    let Some(module) = modules.as_array().into_iter().flatten().find(is_pooling) else { return Ok(false) };
    let name = format!("{}/config.json", module["path"].as_str().unwrap_or("1_Pooling"));
    let Some(text) = files.read(&name)? else { return Ok(true) };
    let config: Value = serde_json::from_str(&text).with_context(|| format!("{name} is not valid JSON"))?;
    if config["pooling_mode_lasttoken"] == false {
        bail!("{name} asks for another pooling than that of the last token, which is the only one");
    }
    Ok(true)
}

/// The end-of-text token of config.json, if the tokenizer does not append it to texts.
fn missing_end(dir: &Path, tokenizer: &Tokenizer) -> Result<Option<u32>> {
    let Some(text) = ModelFiles::open(dir)?.read("config.json")? else { return Ok(None) };
    let config: Value = serde_json::from_str(&text).context("config.json is not valid JSON")?;
    let end = match &config["eos_token_id"] {
        Value::Array(ids) => ids.first().and_then(Value::as_u64),
        id => id.as_u64(),
    };
    let end = end.and_then(|id| u32::try_from(id).ok());
    let ids = tokenizer.encode("a", true)?;
    if ids.len() > 1 && ids.last().is_some_and(|id| tokenizer.is_special(*id)) {
        return Ok(None);
    }
    if let Some(end) = end {
        log::info!("the tokenizer does not end texts: token {end} is appended");
    }
    Ok(end)
}

impl Reranker {
    fn load(dir: &Path, tokenizer: &Tokenizer) -> Result<Self> {
        let token = |text: &str| match tokenizer.encode(text, false)?[..] {
            [id] => Ok(id as usize),
            ref ids => bail!("--task rerank needs a token {text:?}, which takes {} tokens", ids.len()),
        };
        let (yes, no) = (token("yes")?, token("no")?);
        let weights = Weights::open(dir).context("--task rerank needs the output matrix of the checkpoint")?;
        let name =
            MATRICES.into_iter().find(|name| weights.contains(name)).context("the checkpoint has no output matrix")?;
        let shape = weights.describe(name).map_or(Vec::new(), |(_, shape)| shape.to_vec());
        let [vocab, hidden] = shape[..] else { bail!("{name} is no matrix") };
        let stored = weights.bf16(name, &shape)?;
        let row = |id: usize| -> Result<Vec<f32>> {
            if id >= vocab {
                bail!("{name} has no row {id}");
            }
            let mut bytes = vec![0; hidden * 2];
            stored.read(id * bytes.len(), &mut bytes)?;
            // bf16 is the upper half of f32.
            Ok(bytes
                .chunks_exact(2)
                .map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16))
                .collect())
        };
        let difference = row(yes)?.iter().zip(row(no)?).map(|(yes, no)| yes - no).collect();
        Ok(Self { difference })
    }

    /// The logit of "yes" minus that of "no", in f32.
    pub fn logit(&self, vector: &[f32]) -> f32 {
        self.difference.iter().zip(vector).map(|(w, x)| w * x).sum()
    }
}
