//! One connection to a node, for commands that run while no host does: asks, and waits for the answer.

use anyhow::{Context, Result, bail};
use holdfast_api::{Code, refuse};
use holdfast_base::stream::Inbound;
use holdfast_base::{BLOCK_BYTES, Buf, BufMut, DeviceId, GridId, NodeId, SegmentId, ShardId};
use holdfast_format::copy;
use holdfast_format::segment::ShardHeader;
use holdfast_format::wire::{
    DeviceHealth, DeviceStat, FrameReader, HeldVolume, Refusal, Reply, Request, WIRE, encode_frame,
};
use holdfast_runtime::pki::Role;
use holdfast_runtime::tls::link::HostTls;
use holdfast_runtime::tls::{TlsStream, sealed_bytes_max};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// How long connecting, and each answer, may take: a device that is slow, or being opened, answers within it.
const PATIENCE: Duration = Duration::from_secs(5);

/// Volumes or shards of one page of a list.
const PAGE: u32 = 500;

pub struct NodeClient {
    stream: TcpStream,
    tls: Option<TlsStream>,
    reader: FrameReader<Reply>,
    next_token: u64,
    version: u32,
    pub node: NodeId,
    pub address: SocketAddr,
    pub devices: Vec<DeviceStat>,
}

impl NodeClient {
    /// Connects as a host of the grid, and greets.
    pub fn connect(
        grid: GridId,
        host: &str,
        tls: Option<&HostTls>,
        (node, address): (NodeId, SocketAddr),
    ) -> Result<NodeClient> {
        let stream =
            TcpStream::connect_timeout(&address, PATIENCE).with_context(|| format!("cannot reach {address}"))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        let tls = tls.map(|tls| tls.connect(Role::Node(node))).transpose()?;
        let reader = FrameReader::new();
        let mut client =
            NodeClient { stream, tls, reader, next_token: 0, version: 0, node, address, devices: Vec::new() };
        let hello = Request::Hello { versions: WIRE, grid, host: host.to_string() };
        match client.ask(&hello, &[])?.0 {
            Reply::Hello { version, node: found, devices, .. } if found == node => {
                (client.version, client.devices) = (version, devices);
                Ok(client)
            }
            Reply::Hello { node: found, .. } => bail!("node {found} answers at {address}, not node {node}"),
            Reply::Refused(Refusal::Version(versions)) => bail!("{}", versions.apart_from(WIRE)),
            other => bail!("it answered the greeting with {other:?}"),
        }
    }

    /// Devices that can be asked what they hold.
    pub fn serving(&self) -> Vec<DeviceId> {
        self.devices.iter().filter(|stat| stat.health == DeviceHealth::Serving).map(|stat| stat.device).collect()
    }

    pub fn knows_roots(&self) -> bool {
        self.version >= Request::ROOTS_SINCE
    }

    /// One request, and its answer.
    pub fn ask(&mut self, request: &Request, payload: &[u8]) -> Result<(Reply, Buf)> {
        self.next_token += 1;
        let frame = encode_frame(self.next_token, request, payload.len());
        self.send(&frame, payload).context("it went while it was asked")?;
        loop {
            if let Some(frame) = self.reader.pop() {
                if frame.token == self.next_token {
                    return Ok((frame.message, frame.payload));
                }
                continue;
            }
            self.receive()?;
        }
    }

    fn send(&mut self, frame: &[u8], payload: &[u8]) -> Result<()> {
        let Some(tls) = &mut self.tls else {
            self.stream.write_all(frame)?;
            return Ok(self.stream.write_all(payload)?);
        };
        // What is sealed before the handshake is done waits in the session.
        let mut sealed = BufMut::new(sealed_bytes_max(frame.len() + payload.len()));
        let count = tls.seal([frame, payload].into_iter(), &mut sealed);
        self.flush()?;
        self.stream.write_all(&sealed[..count])?;
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        let Some(tls) = &mut self.tls else { return Ok(()) };
        let mut ciphertext = Vec::new();
        tls.take_ciphertext(&mut ciphertext);
        Ok(self.stream.write_all(&ciphertext)?)
    }

    fn receive(&mut self) -> Result<()> {
        let mut bytes = [0; 64 << 10];
        let count = match self.stream.read(&mut bytes) {
            Ok(0) => refuse!(Code::Unavailable, "it closed the connection"),
            Ok(count) => count,
            Err(error) if matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) => {
                refuse!(Code::Unavailable, "it did not answer within {} s", PATIENCE.as_secs())
            }
            Err(error) => return Err(error.into()),
        };
        match &mut self.tls {
            None => self.reader.on_bytes(&bytes[..count]),
            Some(tls) => {
                let reader = &mut self.reader;
                tls.open(&mut bytes[..count], |part| reader.on_bytes(part))?;
                self.flush()?;
            }
        }
        match self.reader.error() {
            Some(error) => bail!("it sent what is no answer ({error})"),
            None => Ok(()),
        }
    }

    /// Everything that a device holds of volumes beside their shards.
    pub fn volumes(&mut self, device: DeviceId) -> Result<Vec<HeldVolume>> {
        let mut all: Vec<HeldVolume> = Vec::new();
        loop {
            let after = all.last().map(|held| held.volume);
            match self.ask(&Request::ListVolumes { device, after, count_max: PAGE }, &[])?.0 {
                Reply::Volumes { volumes, more } => {
                    let is_over = !more || volumes.is_empty();
                    all.extend(volumes);
                    if is_over {
                        return Ok(all);
                    }
                }
                other => bail!("device {device} did not list its volumes: {other:?}"),
            }
        }
    }

    /// Shards of the grid's records on a device, in order.
    pub fn record_shards(&mut self, device: DeviceId) -> Result<Vec<ShardId>> {
        let mut all: Vec<ShardId> = Vec::new();
        loop {
            let after = all.last().copied();
            let request = Request::ListShards { device, volume: copy::RECORDS_VOLUME, after, count_max: PAGE };
            match self.ask(&request, &[])?.0 {
                Reply::Shards { shards, more } => {
                    let is_over = !more || shards.is_empty();
                    all.extend(shards);
                    if is_over {
                        return Ok(all);
                    }
                }
                other => bail!("device {device} did not list its copies of the metadata: {other:?}"),
            }
        }
    }

    /// What a shard that is a copy holds; its blocks are counted from its header.
    pub fn read_copy(&mut self, device: DeviceId, shard: ShardId) -> Result<Vec<u8>> {
        let (reply, header) = self.ask(&Request::ReadShardHeader { device, shard }, &[])?;
        if reply != Reply::ShardHeader {
            bail!("device {device} has no copy {shard:?}: {reply:?}");
        }
        let header = ShardHeader::decode(shard, &header)
            .map_err(|error| anyhow::anyhow!("a copy's header on device {device}: {error}"))?;
        let blocks = header.geometry.shard_blocks();
        let request = Request::ReadShard { device, shard, block: 0, blocks, checked: true, cached: false };
        match self.ask(&request, &[])? {
            (Reply::Shard { .. }, data) if data.len() == blocks as usize * BLOCK_BYTES => {
                let bytes = copy::decode(&data);
                Ok(bytes.map_err(|error| anyhow::anyhow!("a copy on device {device}: {error}"))?.to_vec())
            }
            (other, _) => bail!("device {device} did not give a copy: {other:?}"),
        }
    }

    /// Puts a part of a copy of the grid's records on a device.
    pub fn put_record_part(&mut self, device: DeviceId, grid: GridId, shard: ShardId, bytes: &[u8]) -> Result<()> {
        let (header_blocks, payload) = copy::encode(grid, shard, bytes);
        // Of that volume nothing is ever promised: any epoch will do.
        let SegmentId { volume, epoch, .. } = shard.segment;
        let request = Request::PutShard { device, volume, epoch, shard, header_blocks };
        self.expect_done(&request, &payload)
    }

    /// Lets go of copies of the grid's records.
    pub fn delete_record_parts(&mut self, device: DeviceId, shards: Vec<ShardId>) -> Result<()> {
        let Some(last) = shards.last() else { return Ok(()) };
        let SegmentId { volume, epoch, .. } = last.segment;
        self.expect_done(&Request::DeleteShards { device, volume, epoch, shards }, &[])
    }

    fn expect_done(&mut self, request: &Request, payload: &[u8]) -> Result<()> {
        match self.ask(request, payload)?.0 {
            Reply::Done => Ok(()),
            other => bail!("it answered {other:?}"),
        }
    }
}
