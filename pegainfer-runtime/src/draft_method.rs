//! Checks that a model has the layers of the requested draft method.

use super::config_file::Overrides;
use super::load_error::LoadError;
use super::load_options::LoadOptions;
use pegainfer_core::schedule::speculation::{ModelMethod, Speculation};

/// Changes of config.json by the flags. `drafts`: checkpoints of the model family may have layers that draft.
pub(super) fn overrides<O>(options: &LoadOptions<O>, (family, drafts): (&str, bool)) -> Result<Overrides, LoadError> {
    let method = Speculation::model_method(options.speculation.as_ref());
    let mtp = method == Some(ModelMethod::Mtp);
    let refused = |name: &str| {
        let message = "has no layers that draft for";
        LoadError::Option(format!(
            "--speculative-config: {} {message} \"method\": \"{name}\"; choose \"ngram\" or \"suffix\"",
            family
        ))
    };
    match method {
        Some(ModelMethod::DSpark) => return Err(refused("dspark")),
        Some(ModelMethod::Mtp) if !drafts => return Err(refused("mtp")),
        _ => {}
    }
    Ok(Overrides { mtp, ..options.overrides.clone() })
}

/// Checks that the layers that draft are there; some conversion tools drop them.
pub(super) fn check_drafts<'a>(drafts: bool, mut names: impl Iterator<Item = &'a str>) -> Result<(), LoadError> {
    if drafts && !names.any(|name| name.starts_with("mtp.layers.")) {
        return Err(LoadError::Option(
            "--speculative-config: the checkpoint has no mtp.layers.* tensors for \"method\": \"mtp\"; choose \"ngram\" or \"suffix\", or a \
             checkpoint with them"
                .to_owned(),
        ));
    }
    Ok(())
}
