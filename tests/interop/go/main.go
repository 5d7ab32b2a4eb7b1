// Makes the gRPC calls that drivers.py writes to stdin, with grpc-go, and writes their outcomes to
// stdout. Messages are bytes, which the codec passes on unchanged.
package main

import (
	"context"
	"encoding/json"
	"io"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc"
	_ "google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const service = "embedserve.v1.EmbeddingService"

type call struct {
	Method    string            `json:"method"`
	Requests  [][]byte          `json:"requests"`
	TimeoutMs *float64          `json:"timeout_ms"`
	Cancel    bool              `json:"cancel"`
	InTurns   bool              `json:"in_turns"`
	Metadata  map[string]string `json:"metadata"`
}

type input struct {
	Gzip  bool   `json:"gzip"`
	Calls []call `json:"calls"`
}

type ended struct {
	Answers  [][]byte          `json:"answers"`
	Code     uint32            `json:"code"`
	Message  string            `json:"message"`
	Trailers map[string]string `json:"trailers"`
}

// bytesCodec has the name of the protobuf codec, whose messages it passes on as bytes.
type bytesCodec struct{}

func (bytesCodec) Name() string { return "proto" }

func (bytesCodec) Marshal(message interface{}) ([]byte, error) { return *message.(*[]byte), nil }

func (bytesCodec) Unmarshal(data []byte, message interface{}) error {
	*message.(*[]byte) = append([]byte{}, data...)
	return nil
}

func (c call) context() (context.Context, context.CancelFunc) {
	ctx := metadata.NewOutgoingContext(context.Background(), metadata.New(c.Metadata))
	if c.TimeoutMs != nil {
		return context.WithTimeout(ctx, time.Duration(*c.TimeoutMs*float64(time.Millisecond)))
	}
	return context.WithCancel(ctx)
}

func end(answers [][]byte, err error, trailer metadata.MD) ended {
	said := status.Convert(err)
	trailers := map[string]string{}
	for name, values := range trailer {
		trailers[name] = values[0]
	}
	return ended{answers, uint32(said.Code()), said.Message(), trailers}
}

func unary(connection *grpc.ClientConn, asked call, options []grpc.CallOption) ended {
	ctx, cancel := asked.context()
	defer cancel()
	if asked.Cancel {
		time.AfterFunc(time.Millisecond, cancel)
	}
	answers, answer, trailer := [][]byte{}, []byte{}, metadata.MD{}
	options = append(options, grpc.Trailer(&trailer))
	method := "/" + service + "/" + asked.Method
	err := connection.Invoke(ctx, method, &asked.Requests[0], &answer, options...)
	if err == nil {
		answers = append(answers, answer)
	}
	return end(answers, err, trailer)
}

// stream sends each request after the previous response (in turns), or all while it receives; a
// cancelled stream ends at its first response.
func stream(connection *grpc.ClientConn, asked call, options []grpc.CallOption) ended {
	ctx, cancel := asked.context()
	defer cancel()
	answers := [][]byte{}
	description := &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}
	calls, err := connection.NewStream(ctx, description, "/"+service+"/"+asked.Method, options...)
	if err != nil {
		return end(answers, err, nil)
	}
	turns := make(chan bool, len(asked.Requests)+1)
	turns <- true
	go func() {
		for i := range asked.Requests {
			if asked.InTurns {
				<-turns
			}
			if calls.SendMsg(&asked.Requests[i]) != nil {
				return
			}
		}
		if !asked.Cancel {
			calls.CloseSend()
		}
	}()
	for {
		answer := []byte{}
		if err = calls.RecvMsg(&answer); err != nil {
			break
		}
		answers = append(answers, answer)
		turns <- true
		if asked.Cancel {
			cancel()
		}
	}
	if err == io.EOF {
		err = nil
	}
	return end(answers, err, calls.Trailer())
}

// health returns the status of Check, then the first one of Watch.
func health(connection *grpc.ClientConn, asked call) ended {
	ctx, cancel := asked.context()
	defer cancel()
	client := grpc_health_v1.NewHealthClient(connection)
	request := &grpc_health_v1.HealthCheckRequest{Service: service}
	checked, err := client.Check(ctx, request)
	if err != nil {
		return end(nil, err, nil)
	}
	watch, err := client.Watch(ctx, request)
	if err != nil {
		return end(nil, err, nil)
	}
	watched, err := watch.Recv()
	if err != nil {
		return end(nil, err, nil)
	}
	names := [][]byte{[]byte(checked.Status.String()), []byte(watched.Status.String())}
	return end(names, nil, nil)
}

func ask(connection *grpc.ClientConn, asked call, gzip bool) ended {
	options := []grpc.CallOption{grpc.ForceCodec(bytesCodec{})}
	if gzip {
		options = append(options, grpc.UseCompressor("gzip"))
	}
	switch asked.Method {
	case "Health":
		return health(connection, asked)
	case "EmbedStream":
		return stream(connection, asked, options)
	}
	return unary(connection, asked, options)
}

func main() {
	var given input
	if err := json.NewDecoder(os.Stdin).Decode(&given); err != nil {
		panic(err)
	}
	anySize := grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(1<<30), grpc.MaxCallSendMsgSize(1<<30))
	connection, err := grpc.Dial(os.Args[1], grpc.WithInsecure(), anySize)
	if err != nil {
		panic(err)
	}
	defer connection.Close()
	results := make([]ended, len(given.Calls))
	var waiting sync.WaitGroup
	for i := range given.Calls {
		waiting.Add(1)
		go func(i int) {
			defer waiting.Done()
			results[i] = ask(connection, given.Calls[i], given.Gzip)
		}(i)
	}
	waiting.Wait()
	if err := json.NewEncoder(os.Stdout).Encode(results); err != nil {
		panic(err)
	}
}
