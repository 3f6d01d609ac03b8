//! `pegainfer models`: the models of Hugging Face's cache, and those of a running server.

use super::pull::{self, PullArgs};
use super::served::{self, ServedArgs};
use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use indicatif::DecimalBytes;
use pegainfer_hub::{CachedModel, Hub};
use pegainfer_models::detect;
use pegainfer_terminal::printable::one_line;
use pegainfer_terminal::stdout::{print, print_exact};
use std::fmt::Write;
use std::path::Path;

/// Flags of `models`.
#[derive(Debug, Clone, Args)]
pub struct ModelsArgs {
    /// What to do; `list` if none is given.
    #[command(subcommand)]
    pub action: Option<Action>,
}

/// What to do with the models.
#[derive(Debug, Clone, Subcommand)]
pub enum Action {
    /// Print the name and size of each model, and whether this program runs it (the default)
    List,
    /// Download a model without starting it, and print its path: the same as `pegainfer pull`
    Pull(PullArgs),
    /// Print the models of a running server, and their states
    Served(ServedArgs),
    /// Print the directory of a model, for programs that take one
    Path {
        /// Id of the model
        #[arg(value_name = "ID")]
        id: String,
    },
    /// Delete models from the cache
    Rm {
        /// Ids of the models
        #[arg(value_name = "ID", required = true)]
        ids: Vec<String>,
    },
}

/// Runs the command.
pub fn run(args: &ModelsArgs) -> Result<()> {
    if let Some(Action::Pull(args)) = &args.action {
        return pull::run(args);
    }
    if let Some(Action::Served(args)) = &args.action {
        return served::run(args);
    }
    let hub = Hub::from_env();
    let models = hub.cached().with_context(|| format!("{} cannot be read", hub.cache.display()))?;
    let find = |id: &str| match models.iter().find(|model| model.id == id) {
        Some(model) => Ok(model),
        None => bail!("{} has no model {id}: pegainfer models lists those that it has", hub.cache.display()),
    };
    match args.action.as_ref().unwrap_or(&Action::List) {
        // Done above.
        Action::Pull(_) | Action::Served(_) => Ok(()),
        Action::List if models.is_empty() => print(&format!("{} has no models\n", hub.cache.display())),
        Action::List => print(&table(&models)),
        Action::Path { id } => match find(id)? {
            CachedModel { snapshot: Some(path), percent: 100, .. } => print_exact(&format!("{}\n", path.display())),
            _ => bail!("{id} is not complete: pegainfer pull {id} downloads the rest"),
        },
        Action::Rm { ids } => {
            // Look up all of them before deleting the first one.
            for model in ids.iter().map(|id| find(id)).collect::<Result<Vec<_>>>()? {
                model.remove().with_context(|| format!("{} cannot be deleted", model.id))?;
                print(&format!("deleted {} ({})\n", model.id, DecimalBytes(model.bytes)))?;
            }
            Ok(())
        }
    }
}

/// Name of the family that runs the model in a directory, or why none does.
fn family(dir: &Path) -> Result<&'static str, String> {
    let family = detect::detect(dir).map_err(|error| error.reason())?;
    (family.vocab_size)(dir).map_err(|error| format!("{error:#}"))?;
    Ok(family.name)
}

fn table(models: &[CachedModel]) -> String {
    let width = models.iter().map(|model| model.id.len()).max().unwrap_or(0);
    let mut text = format!("{:width$}  {:>10}  RUNS\n", "NAME", "SIZE");
    for model in models {
        let family = match &model.snapshot {
            Some(snapshot) => family(snapshot),
            None => Err("its config.json is missing".to_owned()),
        };
        let runs = match family {
            Ok(family) if model.percent == 100 => format!("yes ({family})"),
            Ok(family) => {
                format!("incomplete, {} % ({family}): pegainfer pull {} downloads the rest", model.percent, model.id)
            }
            Err(reason) => format!("no: {reason}"),
        };
        // Names from directories and config.json must not start a new row.
        let (id, runs) = (one_line(&model.id), one_line(&runs));
        let size = DecimalBytes(model.bytes).to_string();
        let _ = writeln!(text, "{id:width$}  {size:>10}  {runs}");
    }
    text
}
