//! `holdfast volume xml`: a volume as a disk in the words of libvirt.

use super::format::{print, print_json};
use crate::client;
use crate::grid::layout::GridDir;
use anyhow::Result;
use clap::{Args, ValueEnum};
use holdfast_api::{Code, Request, VolumeInfo, refuse};
use holdfast_host::split_export;
use serde_json::json;
use std::fmt::Write;

/// Longest serial number that a virtio disk shows.
const SERIAL_BYTES: usize = 20;

#[derive(Args, Debug)]
pub struct XmlArgs {
    /// A volume, or VOLUME@SNAPSHOT
    name: String,
    /// What the guest's disk is called on its bus [default: vda on virtio, sda else]
    #[arg(long, value_parser = is_target)]
    dev: Option<String>,
    #[arg(long, value_enum, default_value = "virtio")]
    bus: Bus,
    /// Have QEMU keep requests for so long while the host is started anew; for libvirt later than 9.0
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=86_400))]
    reconnect: Option<u32>,
}

/// The disk controller of the guest.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Bus {
    Virtio,
    Scsi,
    Sata,
    Usb,
}

impl Bus {
    fn name(self) -> &'static str {
        match self {
            Bus::Virtio => "virtio",
            Bus::Scsi => "scsi",
            Bus::Sata => "sata",
            Bus::Usb => "usb",
        }
    }

    fn first(self) -> &'static str {
        if self == Bus::Virtio { "vda" } else { "sda" }
    }
}

fn is_target(text: &str) -> Result<String, String> {
    let letters = ["vd", "sd", "hd", "xvd"].into_iter().find_map(|kind| text.strip_prefix(kind));
    let is_right = letters.is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_lowercase()));
    is_right.then(|| text.to_string()).ok_or_else(|| format!("`{text}` is no disk of a guest: vda, vdb, sda ..."))
}

pub fn run(args: &XmlArgs, dir: &GridDir, json: bool) -> Result<()> {
    let (name, snapshot) = split_export(&args.name);
    let volume = client::volume(dir, &Request::VolumeShow { name: name.to_string() })?;
    super::volume::warn_of(&volume);
    if volume.uris.is_empty() {
        let beside = if volume.host.is_some() { " --multipath" } else { "" };
        refuse!(
            Code::State,
            "volume {name} is not offered by the host of this machine; `holdfast volume export {name}{beside}`, then try again"
        );
    }
    let snapshots = volume.live.as_ref().map_or(&[][..], |live| &live.snapshots);
    if let Some(of) = snapshot.filter(|of| !snapshots.iter().any(|s| s.name == **of)) {
        refuse!(
            Code::NotFound,
            "volume {name} has no snapshot {of} here; `holdfast snapshot list {name}` shows what there is"
        );
    }
    let xml = disk(&volume, snapshot, &dir.nbd_socket().display().to_string(), args);
    if json { print_json(&json!({ "volume": volume.name, "xml": xml })) } else { print(xml) }
}

/// The element, with its end, in lines.
fn disk(volume: &VolumeInfo, snapshot: Option<&str>, socket: &str, args: &XmlArgs) -> String {
    let export = snapshot.map_or_else(|| volume.name.clone(), |of| format!("{}@{of}", volume.name));
    let dev = args.dev.as_deref().unwrap_or(args.bus.first());
    // The same at every host, and for ever.
    let serial: String = volume.id.chars().filter(char::is_ascii_hexdigit).take(SERIAL_BYTES).collect();
    let more = match (snapshot, volume.shared) {
        (Some(_), _) => "  <readonly/>\n",
        (None, true) => "  <shareable/>\n",
        (None, false) => "",
    };
    let reconnect = args.reconnect.map_or(String::new(), |seconds| format!("    <reconnect delay='{seconds}'/>\n"));
    format!(
        "<disk type='network' device='disk'>\n  \
           <driver name='qemu' type='raw' cache='none' discard='unmap'/>\n  \
           <source protocol='nbd' name='{}'>\n    \
             <host transport='unix' socket='{}'/>\n\
         {reconnect}  </source>\n  \
           <target dev='{dev}' bus='{}'/>\n\
         {more}  <serial>{serial}</serial>\n\
         </disk>",
        escaped(&export),
        escaped(socket),
        args.bus.name(),
    )
}

/// As it may stand in an attribute.
fn escaped(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut out, c| {
        match c {
            '&' | '<' | '>' | '\'' | '"' => write!(out, "&#{};", u32::from(c)).expect("text takes whatever is written"),
            c => out.push(c),
        }
        out
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_a_meaning_in_xml_is_written_otherwise() {
        assert_eq!(escaped("/a'b\"<&>é"), "/a&#39;b&#34;&#60;&#38;&#62;é");
    }

    #[test]
    fn a_target_is_a_disk() {
        assert!(["vda", "sdb", "xvdaa"].into_iter().all(|text| is_target(text).is_ok()));
        assert!(["", "vd", "vd1", "sda'", "disk"].into_iter().all(|text| is_target(text).is_err()));
    }
}
