//! `holdfast dashboard`: the grid in a browser of this machine.

use super::format::{print, print_json};
use crate::grid::layout::GridDir;
use anyhow::{Context, Result};
use clap::Args;
use holdfast_api::{Code, refuse};
use holdfast_http::{local_router, serve_local};
use holdfast_runtime::pki::{is_same, random};
use serde_json::json;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    holdfast dashboard                  then open the address that is printed\n  \
    ssh -L 7070:127.0.0.1:7070 HOST holdfast dashboard --listen 127.0.0.1:7070\n\n\
    For other machines without ssh the host serves it itself, with TLS: `holdfast config explain api.tcp`.")]
pub struct DashboardArgs {
    /// An address of this machine that others can't reach; port 0 is any that is free
    #[arg(long, default_value = "127.0.0.1:7070", value_name = "ADDRESS:PORT")]
    listen: SocketAddr,
}

/// Until it is interrupted.
pub fn run(args: &DashboardArgs, dir: &GridDir, json: bool) -> Result<()> {
    if !args.listen.ip().is_loopback() {
        refuse!(
            Code::Invalid,
            "{} is not of this machine alone, and here there is no TLS; take 127.0.0.1, or have the host serve others \
             (`holdfast config explain api.tcp`)",
            args.listen.ip()
        );
    }
    dir.load()?;
    let socket = dir.api_socket();
    if let Err(error) = UnixStream::connect(&socket) {
        refuse!(
            Code::Unavailable,
            "the host can't be asked at {}: {error}; `holdfast status` says how it does",
            socket.display()
        );
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind(args.listen).await;
        let listener =
            listener.with_context(|| format!("cannot listen on {}; take another port with --listen", args.listen))?;
        let key = format!("{:032x}", u128::from_le_bytes(random()));
        let address = format!("http://{}/#token={key}", listener.local_addr()?);
        match json {
            true => print_json(&json!({ "address": address }))?,
            false => {
                print(format_args!("{address}\n\nServed until Ctrl-C. Whoever has the address may do what you may."))?
            }
        }
        let is_key = move |shown: &str| is_same(shown.as_bytes(), key.as_bytes());
        serve_local(listener, local_router(socket, is_key)).await;
        Ok(())
    })
}
