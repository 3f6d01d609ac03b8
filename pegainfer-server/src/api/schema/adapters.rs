//! Fields of `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`.

use schemars::JsonSchema;
use serde::Deserialize;

/// An adapter to load.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct LoadAdapterFields {
    /// Name that requests use as `model`.
    #[schemars(required)]
    pub lora_name: Option<String>,
    /// Its folder, in the folder of `--lora-root`.
    #[schemars(required)]
    pub lora_path: Option<String>,
    /// Replace an adapter of this name.
    pub load_inplace: Option<bool>,
    /// Name of the model that it changes; the first one by default.
    pub base_model_name: Option<String>,
}

/// An adapter to unload.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct UnloadAdapterFields {
    /// Its name.
    #[schemars(required)]
    pub lora_name: Option<String>,
    /// Not used.
    pub lora_int_id: Option<u64>,
}
