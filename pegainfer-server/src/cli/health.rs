//! `pegainfer health`: asks a running server whether it is healthy, for the health checks of containers.

use super::serve_args::ServeArgs;
use super::settings;
use anyhow::{Context, Result, anyhow, ensure};
use clap::{Args, Parser, Subcommand};
use pegainfer_terminal::stdout::print;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use ureq::Agent;
use ureq::tls::TlsConfig;

/// Maximum time for the answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Flags of `health`.
#[derive(Debug, Clone, Args)]
pub struct HealthArgs {
    /// Process of the server, of which flags, environment and configuration file say where it listens; 1 in a container
    #[arg(long, value_name = "PID", default_value_t = 1)]
    pub pid: u32,
}

/// The command line of a server.
#[derive(Debug, Parser)]
#[command(name = "pegainfer", args_conflicts_with_subcommands = true)]
struct ServerLine {
    #[command(subcommand)]
    command: Option<ServerCommand>,
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    serve: ServeArgs,
}

#[derive(Debug, Subcommand)]
enum ServerCommand {
    Serve(Box<ServeArgs>),
}

/// Succeeds if `/health` of the server answers 200.
pub fn run(args: &HealthArgs) -> Result<()> {
    let url = url(&server(Path::new("/proc"), args.pid)?)?;
    // The certificate names the server's public host, and this request stays on the machine.
    let tls = TlsConfig::builder().disable_verification(true).build();
    let config = Agent::config_builder().tls_config(tls).timeout_global(Some(TIMEOUT)).http_status_as_error(false);
    let agent: Agent = config.proxy(None).build().into();
    let mut response = agent.get(&url).call().with_context(|| format!("{url} does not answer"))?;
    let status = response.status().as_u16();
    let text = response.body_mut().read_to_string().unwrap_or_default();
    ensure!(status == 200, "{url} answers {status}: {}", text.trim());
    print(&text)
}

/// The flags of the server that runs as process `pid`, from below `proc`.
fn server(proc: &Path, pid: u32) -> Result<ServeArgs> {
    let read = |file: &str| {
        let path = proc.join(pid.to_string()).join(file);
        let bytes =
            fs::read(&path).with_context(|| format!("process {pid} cannot be looked at: {}", path.display()))?;
        Ok::<Vec<OsString>, anyhow::Error>(fields(&bytes))
    };
    let (line, environment) = (read("cmdline")?, read("environ")?);
    let is_server = line.first().is_some_and(|name| Path::new(name).file_stem() == Some(OsStr::new("pegainfer")));
    ensure!(is_server, "process {pid} is not pegainfer: give the one that is as --pid");
    let variable = |name: &str| {
        environment.iter().find_map(|pair| Some(pair.to_str()?.strip_prefix(name)?.strip_prefix('=')?.into()))
    };
    let line: ServerLine =
        settings::parse(line, variable).map_err(|_| anyhow!("the flags of process {pid} are not those of a server"))?;
    Ok(match line.command {
        Some(ServerCommand::Serve(args)) => *args,
        None => line.serve,
    })
}

/// Texts that end with NUL.
fn fields(bytes: &[u8]) -> Vec<OsString> {
    let texts = bytes.split(|byte| *byte == 0).filter(|text| !text.is_empty());
    texts.map(|text| String::from_utf8_lossy(text).into_owned().into()).collect()
}

/// The address of `/health` for this machine.
fn url(args: &ServeArgs) -> Result<String> {
    ensure!(args.port != 0, "the server has chosen its port itself: give it a --port");
    let scheme = if args.http.tls_cert.is_some() { "https" } else { "http" };
    let host = match args.host.parse::<IpAddr>() {
        Ok(IpAddr::V4(address)) if address.is_unspecified() => "127.0.0.1".to_owned(),
        Ok(IpAddr::V6(address)) if address.is_unspecified() => "[::1]".to_owned(),
        Ok(IpAddr::V6(address)) => format!("[{address}]"),
        _ => args.host.clone(),
    };
    Ok(format!("{scheme}://{host}:{}/health", args.port))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The address of a server with this command line and environment.
    fn address(line: &[&str], environment: &[&str]) -> Result<String> {
        let proc = tempfile::tempdir().unwrap();
        let dir = proc.path().join("7");
        fs::create_dir(&dir).unwrap();
        let text = |fields: &[&str]| fields.iter().map(|field| format!("{field}\0")).collect::<String>();
        fs::write(dir.join("cmdline"), text(line)).unwrap();
        fs::write(dir.join("environ"), text(environment)).unwrap();
        url(&server(proc.path(), 7)?)
    }

    #[test]
    fn the_server_is_found_by_its_flags_and_environment() {
        for (line, environment, expected) in [
            (&["pegainfer"][..], &[][..], "http://127.0.0.1:8000/health"),
            (&["/usr/local/bin/pegainfer", "serve", "--host", "0.0.0.0"], &["A=b"], "http://127.0.0.1:8000/health"),
            (&["pegainfer", "Qwen/Qwen3-0.6B", "--host=::"], &["PEGAINFER_PORT=8080"], "http://[::1]:8080/health"),
            (&["pegainfer", "--port", "1"], &["PEGAINFER_PORT=8080"], "http://127.0.0.1:1/health"),
            (&["pegainfer", "--host", "10.0.0.7"], &["PEGAINFER_PORT=tcp://1.2.3.4:5"], "http://10.0.0.7:8000/health"),
            (&["pegainfer", "--tls-cert", "c", "--tls-key", "k"], &[], "https://127.0.0.1:8000/health"),
        ] {
            assert_eq!(address(line, environment).unwrap(), expected, "{line:?}");
        }
    }

    #[test]
    fn other_processes_are_told_apart() {
        let error = |line: &[&str]| address(line, &[]).unwrap_err().to_string();
        assert_eq!(error(&["/bin/bash", "-c", "x"]), "process 7 is not pegainfer: give the one that is as --pid");
        assert_eq!(error(&["pegainfer", "pull", "a/b"]), "the flags of process 7 are not those of a server");
        assert_eq!(error(&["pegainfer", "--port", "0"]), "the server has chosen its port itself: give it a --port");
        assert!(server(Path::new("/nowhere"), 7).unwrap_err().to_string().starts_with("process 7 cannot be looked at"));
    }
}
