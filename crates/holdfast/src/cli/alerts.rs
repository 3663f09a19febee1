//! `holdfast alerts …`: whether people are told what is not well.

use super::format::{print, print_json};
use crate::client;
use crate::grid::layout::GridDir;
use anyhow::Result;
use clap::{Args, Subcommand};
use holdfast_api::{Code, refuse};

#[derive(Args, Debug)]
#[command(after_help = "Whom a host tells is set in holdfast.toml: alerts.webhook, alerts.smtp, alerts.mail_from and \
                        alerts.mail_to (`holdfast config explain alerts.webhook`).")]
pub struct AlertsArgs {
    #[command(subcommand)]
    action: AlertsAction,
}

#[derive(Subcommand, Debug)]
enum AlertsAction {
    /// Have this machine's host send a test by each way that is set, and say what became of it
    Test,
}

pub fn run(args: &AlertsArgs, dir: &GridDir, json: bool) -> Result<()> {
    let AlertsAction::Test = args.action;
    let arrivals = client::test_alerts(dir)?;
    match json {
        true => print_json(&arrivals)?,
        false => arrivals.iter().try_for_each(|arrival| match &arrival.trouble {
            None => print(format_args!("{}: sent", arrival.way)),
            Some(trouble) => print(format_args!("{}: {trouble}", arrival.way)),
        })?,
    }
    if arrivals.iter().any(|arrival| arrival.trouble.is_some()) {
        refuse!(Code::Failed, "not all of it was sent; set the keys right in holdfast.toml, and restart the host");
    }
    Ok(())
}
