//! Checks that a checkpoint has the layers of the requested draft method.

use crate::config::{Config, Drafts};
use pegainfer_core::schedule::speculation::{ModelMethod, Speculation};
use pegainfer_core::weights::Checkpoint;
use pegainfer_runtime::LoadError;

/// The method of drafts by the model in `--speculative-config`, and a tensor that every checkpoint with its layers has.
fn method_and_tensor(method: ModelMethod) -> (&'static str, &'static str) {
    match method {
        ModelMethod::Mtp => ("mtp", "mtp.0.e_proj.weight"),
        ModelMethod::DSpark => ("dspark", "mtp.0.main_proj.weight"),
    }
}

/// `config`, with the layers that draft if `speculation` asks for drafts by the model. An error if it has no suitable
/// layers. `step_tokens`: maximum number of tokens in a step; `None` is many.
pub(crate) fn with_drafts(
    config: Config,
    speculation: Option<&Speculation>,
    step_tokens: Option<usize>,
) -> Result<Config, LoadError> {
    let (Some(method), Some(Speculation { num_tokens, .. })) = (Speculation::model_method(speculation), speculation)
    else {
        return Ok(Config { loads_drafts: false, ..config });
    };
    let name = method_and_tensor(method).0;
    if speculation.is_some_and(|all| all.draft_vocab_size.is_some()) {
        let reason = "\"draft_vocab_size\" is for Qwen models: leave it out";
        return Err(LoadError::Option(format!("--speculative-config: {reason}")));
    }
    let instead = |reason: &str, others: &str| Some(format!("{reason}: choose {others} instead of \"{name}\""));
    let reason = match (&config.drafts, method) {
        (Drafts::Mtp { layers: 1 }, ModelMethod::Mtp) => None,
        (Drafts::Mtp { layers }, ModelMethod::Mtp) => {
            let reason = format!("drafts by {layers} layers are not implemented, only by one");
            instead(&reason, "\"ngram\" or \"suffix\"")
        }
        (Drafts::Mtp { .. }, ModelMethod::DSpark) => instead("the checkpoint drafts by one layer", "\"mtp\""),
        (Drafts::DSpark(_), ModelMethod::Mtp) => instead("the checkpoint drafts by DSpark", "\"dspark\""),
        (Drafts::DSpark(dspark), ModelMethod::DSpark) => {
            let block = dspark.block.tokens;
            if *num_tokens > block {
                Some(format!("\"num_speculative_tokens\" is {num_tokens}; the checkpoint drafts {block} at most"))
            } else {
                step_tokens.filter(|tokens| *tokens < block).map(|tokens| {
                    format!("\"dspark\" needs --max-num-batched-tokens of at least {block}, got {tokens}")
                })
            }
        }
        (Drafts::None, _) => instead("config.json has no layers that draft", "\"ngram\" or \"suffix\""),
    };
    match reason {
        Some(reason) => Err(LoadError::Option(format!("--speculative-config: {reason}"))),
        None => Ok(Config { loads_drafts: true, ..config }),
    }
}

/// An error if the tensors of the layers that `config` asks for are missing in `checkpoint`; some tools drop them.
pub(crate) fn check_tensors(config: &Config, checkpoint: &Checkpoint) -> Result<(), LoadError> {
    let (method, tensor) = match config.drafts {
        Drafts::Mtp { .. } if config.loads_drafts => method_and_tensor(ModelMethod::Mtp),
        Drafts::DSpark(_) if config.loads_drafts => method_and_tensor(ModelMethod::DSpark),
        _ => return Ok(()),
    };
    match checkpoint.contains(tensor) {
        true => Ok(()),
        false => Err(LoadError::Option(format!(
            "--speculative-config: the checkpoint has no {tensor} for \"method\": \"{method}\"; choose \"ngram\" or \"suffix\", or \
             a checkpoint with it"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::flash;
    use pegainfer_core::schedule::speculation::DraftSource;

    fn speculation(method: ModelMethod, num_tokens: usize) -> Speculation {
        Speculation {
            num_tokens,
            source: DraftSource::Model(method),
            adaptive: true,
            draft_vocab_size: None,
            synthetic_acceptance_length: None,
        }
    }

    /// April drafts with one layer, 0731 with DSpark and up to five tokens.
    #[test]
    fn what_the_layers_cannot_do_is_refused_with_what_to_choose() {
        let (april, dspark) = (flash(false), flash(true));
        let load = |config: &Config, speculation: &Speculation, step_tokens| {
            with_drafts(config.clone(), Some(speculation), Some(step_tokens)).map(|config| config.loads_drafts)
        };
        let refused = |config: &Config, speculation: &Speculation, step_tokens, with: &str| {
            let error = load(config, speculation, step_tokens).unwrap_err().to_string();
            assert!(error.starts_with("--speculative-config: ") && error.contains(with), "{error}");
        };
        let (mtp, blocks) = (speculation(ModelMethod::Mtp, 3), speculation(ModelMethod::DSpark, 5));
        assert!(load(&april, &mtp, 64).unwrap() && load(&dspark, &blocks, 64).unwrap());
        assert!(!with_drafts(april.clone(), None, Some(64)).unwrap().loads_drafts);
        refused(&april, &blocks, 64, "choose \"mtp\" instead of \"dspark\"");
        refused(&dspark, &mtp, 64, "choose \"dspark\" instead of \"mtp\"");
        refused(&dspark, &speculation(ModelMethod::DSpark, 6), 64, "drafts 5 at most");
        refused(&dspark, &blocks, 4, "--max-num-batched-tokens of at least 5, got 4");
        let vocabulary = Speculation { draft_vocab_size: Some(98_304), ..mtp };
        refused(&april, &vocabulary, 64, "\"draft_vocab_size\" is for Qwen models: leave it out");
    }
}
